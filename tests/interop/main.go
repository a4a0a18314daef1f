// Reads a log of Chorister with the tools of others, none of which knows Chorister.
//
//	interop read URL VKEY SAMPLES SIZES   tessera's client and fsck, golang.org/x/mod/sumdb/tlog
//	interop proof FILE POLICY             torchwood's VerifyProof, under a c2sp.org/tlog-policy
package main

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"log"
	"math/rand"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"

	"filippo.io/torchwood"
	"github.com/transparency-dev/merkle/proof"
	"github.com/transparency-dev/merkle/rfc6962"
	"github.com/transparency-dev/tessera/api"
	"github.com/transparency-dev/tessera/client"
	"github.com/transparency-dev/tessera/fsck"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

func main() {
	log.SetFlags(0)
	switch {
	case len(os.Args) == 6 && os.Args[1] == "read":
		read(os.Args[2], os.Args[3], number(os.Args[4]), number(os.Args[5]))
	case len(os.Args) == 4 && os.Args[1] == "proof":
		checkProof(os.Args[2], os.Args[3])
	default:
		log.Fatal("usage: interop read URL VKEY SAMPLES SIZES | interop proof FILE POLICY")
	}
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// tiles reads tiles for golang.org/x/mod/sumdb/tlog, whose own paths are those of the checksum
// database.
type tiles struct{ base string }

func (t tiles) Height() int { return 8 }

func (t tiles) SaveTiles([]tlog.Tile, [][]byte) {}

func (t tiles) ReadTiles(wanted []tlog.Tile) ([][]byte, error) {
	var found [][]byte
	for _, tile := range wanted {
		// tile/8/L/NNN has the height in front of the level.
		path := strings.Replace(tile.Path(), "tile/8/", "tile/", 1)
		answer, err := http.Get(t.base + path)
		if err != nil {
			return nil, err
		}
		data, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || answer.StatusCode != http.StatusOK {
			return nil, fmt.Errorf("%s: %s %v", path, answer.Status, err)
		}
		found = append(found, data)
	}
	return found, nil
}

func read(base, vkey string, samples, sizes int) {
	ctx := context.Background()
	if !strings.HasSuffix(base, "/") {
		base += "/"
	}
	verifier, err := note.NewVerifier(vkey)
	check(err)
	root, err := url.Parse(base)
	check(err)
	fetcher, err := client.NewHTTPFetcher(root, nil)
	check(err)
	checkpoint, _, _, err := client.FetchCheckpoint(ctx, fetcher.ReadCheckpoint, verifier, verifier.Name())
	check(err)
	size := checkpoint.Size

	check(fsck.New(verifier.Name(), verifier, fetcher, leafHashes, fsck.Opts{N: 4}).Check(ctx))

	builder, err := client.NewProofBuilder(ctx, size, fetcher.ReadTile)
	check(err)
	tree := tlog.Tree{N: int64(size), Hash: tlog.Hash(checkpoint.Hash)}
	reader := tlog.TileHashReader(tree, tiles{base})
	for range samples {
		index := rand.Uint64() % size
		bundle, err := client.GetEntryBundle(ctx, fetcher.ReadEntryBundle, index/256, size)
		check(err)
		leaf := rfc6962.DefaultHasher.HashLeaf(bundle.Entries[index%256])
		path, err := builder.InclusionProof(ctx, index)
		check(err)
		check(proof.VerifyInclusion(rfc6962.DefaultHasher, index, size, leaf, path, checkpoint.Hash))
		record, err := tlog.ProveRecord(tree.N, int64(index), reader)
		check(err)
		check(tlog.CheckRecord(record, tree.N, tree.Hash, int64(index), tlog.Hash(leaf)))
	}
	for range sizes {
		smaller := 1 + rand.Uint64()%size
		old, err := tlog.TreeHash(int64(smaller), reader)
		check(err)
		path, err := builder.ConsistencyProof(ctx, smaller, size)
		check(err)
		check(proof.VerifyConsistency(rfc6962.DefaultHasher, smaller, size, path, old[:], checkpoint.Hash))
	}
	fmt.Printf("%d entries, %d inclusion proofs, %d consistency proofs\n", size, samples, sizes)
}

func leafHashes(bundle []byte) ([][]byte, error) {
	var entries api.EntryBundle
	if err := entries.UnmarshalText(bundle); err != nil {
		return nil, err
	}
	var hashes [][]byte
	for _, entry := range entries.Entries {
		hashes = append(hashes, rfc6962.DefaultHasher.HashLeaf(entry))
	}
	return hashes, nil
}

// checkProof takes the entry from the proof's extra data, as a device does.
func checkProof(path, policyPath string) {
	data, err := os.ReadFile(path)
	check(err)
	lines, err := os.ReadFile(policyPath)
	check(err)
	policy, err := torchwood.ParsePolicy(lines)
	check(err)
	extra, found := strings.CutPrefix(strings.Split(string(data), "\n")[1], "extra ")
	if !found {
		log.Fatal("the proof has no extra data")
	}
	entry, err := base64.StdEncoding.DecodeString(extra)
	check(err)
	check(torchwood.VerifyProof(policy, tlog.RecordHash(entry), data))
	fmt.Printf("proof of an entry with SHA-256 %x\n", sha256.Sum256(entry))
}
