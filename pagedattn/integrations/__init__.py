"""Other libraries on top of paged attention: a module for each, nothing imported here."""
