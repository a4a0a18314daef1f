//! The native module of Chorister: Prio3 and HPKE for whole batches, random bits, and the certified privacy bound.
//!
//! Cryptography is done by the crates `prio` and `rustls` (HPKE over AWS-LC); this module adds batches. Its modules follow
//! a report: `sampling` draws its noisy bits, `prio3` and `hpke` create its shares, `job` verifies and adds
//! them up, `wire` encodes them in between. `bound` is what devices enforce before any of it.
//! `python` is the only module that knows Python.

pub mod bound;
pub mod error;
pub mod hpke;
pub mod job;
pub mod parallel;
pub mod prio3;
#[cfg(feature = "python")]
mod python;
pub mod sampling;
pub mod wire;
