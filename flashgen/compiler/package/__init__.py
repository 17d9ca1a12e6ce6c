"""What ``flashgen build`` writes, and what an opened package brings."""
