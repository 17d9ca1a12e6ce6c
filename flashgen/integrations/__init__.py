"""What makes other libraries use flashgen's kernels; each module needs the library whose name it has."""
