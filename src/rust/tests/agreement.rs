//! A report that proves itself under every joint randomness, its public share altered: both aggregators
//! refuse it. `prio`'s own ping-pong helper would count it, and the leader would not.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use _native::error::ReportError;
use _native::prio3::{Engine, Kind, Shares};
use prio::codec::{Decode, Encode};
use prio::field::Field128;
use prio::vdaf::xof::{IntoFieldVec, Xof, XofTurboShake128};

const LENGTH: usize = 7;
const CONTEXT: &[u8] = b"context";
const KEY: [u8; 32] = [3; 32];
const NONCE: [u8; 16] = [5; 16];
const ELEMENT: usize = 16;
const SEED: usize = 32;

/// The kinds of Chorister's reports, the elements of an encoded measurement (with bits of the weight), and
/// a chunk length that divides them: what pads a chunk is no one, and then 0 is no proof.
const KINDS: [(Kind, usize, usize); 2] = [
    (Kind::SumVec { length: LENGTH, max_measurement: 1 }, LENGTH, 7),
    (Kind::MultihotCountVec { length: LENGTH, max_weight: LENGTH }, LENGTH + 3, 5),
];

/// All ones, and a proof that is 0 throughout: the leader's share of it cancels the helper's.
fn without_a_proof(engine: &dyn Engine, elements: usize) -> Shares {
    let mut shares = engine.shard(CONTEXT, &[1; LENGTH], &NONCE).unwrap();
    let (start, end) = (ELEMENT * elements, shares.leader.len() - SEED);
    let tag = [&[18, 0], &engine.algorithm_id().to_be_bytes()[..], &[0, 2], CONTEXT].concat();
    let seed: &[u8; SEED] = shares.helper.first_chunk().unwrap();
    let proof: Vec<Field128> = XofTurboShake128::seed_stream(seed, &[&tag], &[&[1, 1]])
        .into_field_vec((end - start) / ELEMENT);
    let cancelled: Vec<u8> =
        proof.iter().flat_map(|element| (-*element).get_encoded().unwrap()).collect();
    assert!(Field128::get_decoded(&cancelled[..ELEMENT]).is_ok());
    shares.leader[start..end].copy_from_slice(&cancelled);
    shares
}

/// What each side makes of a report: the helper, then the leader.
fn verified(engine: &dyn Engine, shares: &Shares) -> (Option<ReportError>, Option<ReportError>) {
    let (state, message) =
        engine.leader_initialize(&KEY, CONTEXT, &NONCE, &shares.public, &shares.leader).unwrap();
    let helped =
        engine.helper_initialize(&KEY, CONTEXT, &NONCE, &shares.public, &shares.helper, &message);
    match helped {
        Ok((_, message)) => (None, engine.leader_finish(CONTEXT, state, &message).err()),
        Err(error) => (Some(error), Some(error)),
    }
}

#[test]
fn a_proof_for_every_randomness_is_accepted_by_both() {
    for (kind, elements, chunk) in KINDS {
        let (engine, _) = kind.engine(Some(chunk)).unwrap();
        let shares = without_a_proof(engine.as_ref(), elements);
        assert_eq!(verified(engine.as_ref(), &shares), (None, None), "{kind:?}");
    }
}

#[test]
fn an_altered_part_is_refused_by_both() {
    for (kind, elements, chunk) in KINDS {
        let (engine, _) = kind.engine(Some(chunk)).unwrap();
        for place in 0..2 * SEED {
            let mut shares = without_a_proof(engine.as_ref(), elements);
            shares.public[place] ^= 1;
            let refused = Some(ReportError::VdafVerifyError);
            assert_eq!(verified(engine.as_ref(), &shares), (refused, refused), "{kind:?} {place}");
        }
    }
}
