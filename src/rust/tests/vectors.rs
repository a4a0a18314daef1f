//! The published VDAF test vectors, sharding with their fixed randomness included.
//!
//! They are read from `../shared/vectors/vdaf` beside the repository, and are no part of it.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::PathBuf;

use prio::field::Field64;
use prio::flp::gadgets::{Mul, ParallelSum};
use prio::flp::types::SumVec;
use prio::vdaf::prio3::{
    Prio3, Prio3Count, Prio3Histogram, Prio3MultihotCountVec, Prio3Sum, Prio3SumVec,
};
use prio::vdaf::test_utils::{TestVector, check_test_vector, check_test_vector_custom_constructor};
use prio::vdaf::xof::XofTurboShake128;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/vectors/vdaf")
}

/// Runs `check` on every vector whose name is `name`, `_`, and something in lower case or digits.
fn each(name: &str, expected: usize, check: impl Fn(&TestVector)) {
    if !folder().is_dir() {
        assert!(std::env::var_os("CI").is_none(), "no test vectors at {:?}", folder());
        eprintln!("skipped: no test vectors at {:?}", folder());
        return;
    }
    let mut checked = 0;
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if stem.split_once('_').is_some_and(|(start, _)| start == name) {
            check(&serde_json::from_slice(&fs::read(&path).unwrap()).unwrap());
            checked += 1;
        }
    }
    assert_eq!(checked, expected, "vectors of {name}");
}

#[test]
fn count() {
    each("Prio3Count", 7, check_test_vector::<Prio3Count, 32, 16>);
}

#[test]
fn sum() {
    each("Prio3Sum", 3, check_test_vector::<Prio3Sum, 32, 16>);
}

#[test]
fn sum_vec() {
    each("Prio3SumVec", 2, check_test_vector::<Prio3SumVec, 32, 16>);
}

#[test]
fn histogram() {
    each("Prio3Histogram", 7, check_test_vector::<Prio3Histogram, 32, 16>);
}

#[test]
fn multihot_count_vec() {
    each("Prio3MultihotCountVec", 3, check_test_vector::<Prio3MultihotCountVec, 32, 16>);
}

/// Three proofs over the small field, under the algorithm id that the vectors reserve for it.
#[test]
fn sum_vec_with_multiproof() {
    type Multiproof = Prio3<SumVec<Field64, ParallelSum<Field64, Mul>>, XofTurboShake128, 32>;
    each("Prio3SumVecWithMultiproof", 2, |vector| {
        check_test_vector_custom_constructor::<Multiproof, 32, 16>(vector, |shares, parameters| {
            let number = |name: &str| parameters[name].as_u64().unwrap();
            let typ = SumVec::new(
                number("max_measurement"),
                number("length") as usize,
                number("chunk_length") as usize,
            );
            Prio3::new(shares, 3, 0xFFFF_FFFF, typ.unwrap()).unwrap()
        });
    });
}
