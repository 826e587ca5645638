"""Teachers: loading one, and its targets live or from the cache."""
