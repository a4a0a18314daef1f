"""The public log as everyone sees it: Merkle tree, entries, checkpoints, and who checks what.

A device calls `reader.read_log`, an aggregator `cosigner.Cosigner.cosign`, an auditor
`auditor.audit`. docs/concepts/log.md says what the log protects; docs/reference/log.md has every
format, byte by byte.
"""
