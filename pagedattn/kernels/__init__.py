"""Device code. Nothing here knows of tables, specs or backends: pointers and numbers in, memory out."""
