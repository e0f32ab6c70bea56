"""Models of what caches and memory see when rows are read in some order."""
