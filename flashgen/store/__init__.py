"""Files on disk: the cache of what was compiled, its locks, who may write to it, and what ships with flashgen."""
