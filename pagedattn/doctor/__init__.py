"""`pagedattn doctor`: what is installed here, what works, and what cures what does not."""
