//go:build tools

// Names the witnesses that test_existing_witnesses.py builds, so that their versions are pinned here.
package tools

import (
	_ "filippo.io/torchwood/cmd/litewitness"
	_ "github.com/transparency-dev/witness/cmd/omniwitness"
)
