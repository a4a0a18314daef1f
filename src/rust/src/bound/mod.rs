//! The certified bound on what a sum of private one-hot reports reveals: what devices enforce.
//!
//! Pure functions of a cohort, a mechanism, its `eps0` and an epsilon, a delta or a Renyi order. The
//! theorems are in `docs/privacy.md`; each module states and proves what it computes.
//!
//! - `counts`: the law of one coordinate's sum, to full relative precision;
//! - `pair`: that coordinate with and without one device, and all its hockey-stick divergences;
//! - `envelope`: one curve above the divergences of many pairs, and the delta of a release under it;
//! - `blocks`: an envelope of every crowd;
//! - `exact`: epsilon and delta of a release between a witness and the certified bound;
//! - `renyi`: certified Renyi divergences.
//!
//! # Rounding
//!
//! Nothing is subtracted but where stated, so errors stay relative: `u` is `2^-53`, and every law knows a
//! bound on the relative error of its entries (`counts`) which every divergence adds to itself (`pair`). What
//! is left is covered by `SLACK`, a relative `1e-9` on every delta: the rounding of `q` and `h` (a relative
//! `2u` of `q` changes the probability of a count `s` standard deviations off by a relative `2u s sigma`, below `1e-10`),
//! sums of at most `2^20` positive terms (`2^20 u < 2e-10`), and a threshold count that is missed by one where `A` and
//! `gB` agree to all digits. This is an analysis of rounding, not interval arithmetic.
//!
//! # Work
//!
//! Nobody can make this code work for long: no law has more than `counts::MAX_COUNTS` entries (beyond that users
//! are dropped, which only raises the bound), and the laws of one call together have no more than `MAX_WORK`. An
//! entry takes some ten nanoseconds.

pub mod blocks;
pub mod counts;
pub mod envelope;
pub mod exact;
pub mod pair;
pub mod renyi;

use crate::error::Error;

/// Unit roundoff.
pub const U: f64 = f64::EPSILON / 2.0;
/// What is added to every certified delta for rounding, relatively.
pub const SLACK: f64 = 1e-9;
/// Largest cohort.
pub const MAX_COHORT: u64 = 1_000_000_000;
/// Range of `eps0`.
pub const LOCAL_EPSILONS: std::ops::RangeInclusive<f64> = 0.001..=20.0;
/// Below this no amplification is claimed: products of such numbers would leave the range of a float.
pub const LEAST_DELTA: f64 = 1e-250;

/// Entries of all laws that one epsilon or delta computes, at most.
pub const MAX_WORK: usize = blocks::MAX_SWEEP
    + exact::MAX_SWEEPS * exact::MAX_REPEATED
    + (blocks::MORE_BLOCKS + 8) * (counts::MAX_COUNTS + 3 * blocks::KNOTS);

/// The chances of a one at a device's other coordinates (`q`) and at its own (`h`), and of a zero.
///
/// Each is computed by itself: one minus a number near one would lose its digits.
#[derive(Clone, Copy, Debug)]
pub struct Chances {
    pub symmetric: bool,
    pub q: f64,
    pub not_q: f64,
    pub h: f64,
    pub not_h: f64,
    /// `h - q`.
    pub gap: f64,
    /// The local guarantee in the replacement model: the epsilon at which delta is 0 in any cohort.
    pub replacement: f64,
}

impl Chances {
    /// Those of a mechanism; refuses an `eps0` that is not a number of the supported range.
    pub fn new(symmetric: bool, local_epsilon: f64) -> Result<Self, Error> {
        if !LOCAL_EPSILONS.contains(&local_epsilon) {
            return Err(Error::InvalidInput(format!(
                "local_epsilon must lie between {} and {}, not {local_epsilon}",
                LOCAL_EPSILONS.start(),
                LOCAL_EPSILONS.end()
            )));
        }
        let q = 1.0 / (local_epsilon.exp() + 1.0);
        let not_q = 1.0 / ((-local_epsilon).exp() + 1.0);
        let half = (local_epsilon / 2.0).tanh();
        Ok(if symmetric {
            let replacement = 2.0 * local_epsilon;
            Self { symmetric, q, not_q, h: not_q, not_h: q, gap: half, replacement }
        } else {
            let gap = half / 2.0;
            Self { symmetric, q, not_q, h: 0.5, not_h: 0.5, gap, replacement: local_epsilon }
        })
    }

    /// The chances of a zero in place of those of a one: what a count of zeros sees.
    #[must_use]
    pub fn flipped(self) -> Self {
        Self { q: self.not_q, not_q: self.q, h: self.not_h, not_h: self.h, ..self }
    }
}

/// Refuses cohorts that are not between 1 and `MAX_COHORT`; returns the number of others.
pub fn others(cohort: u64) -> Result<u64, Error> {
    if (1..=MAX_COHORT).contains(&cohort) {
        return Ok(cohort - 1);
    }
    Err(Error::InvalidInput(format!(
        "cohort must be an integer from 1 to {MAX_COHORT}, not {cohort}"
    )))
}

fn internal(what: &str) -> Error {
    Error::Internal(what.into())
}
