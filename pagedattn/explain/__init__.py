"""`pagedattn explain`: which backend computes a layer kind, with what memory, and why."""
