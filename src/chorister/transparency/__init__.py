"""The public log as everyone sees it: Merkle tree, entries, checkpoints, who checks what."""
