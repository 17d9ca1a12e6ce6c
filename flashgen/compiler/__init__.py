"""From the text of a spec to plans, sources and binaries, and to a package on disk. Nothing here runs a kernel."""
