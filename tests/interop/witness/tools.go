//go:build tools

// Names the witness that test_witness.py builds, so that its version is pinned here.
package tools

import _ "filippo.io/torchwood/cmd/litewitness"
