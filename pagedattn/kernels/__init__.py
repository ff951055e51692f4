"""Device code: pointers and numbers in, memory out. It knows no tables, specs or backends."""
