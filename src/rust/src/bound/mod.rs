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
//! Nobody can make this code run for long: no law has more than `counts::MAX_COUNTS` entries (beyond that users
//! are dropped, which only raises the bound), and the laws of one call together have no more than `MAX_WORK`. An
//! entry takes about ten nanoseconds.

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
/// Least chance of a one or a zero, and least `h - q`: those of the largest and the least `eps0` lie above.
const LEAST_CHANCE: f64 = 1e-9;
const LEAST_GAP: f64 = 1e-4;
/// Largest local guarantee.
const MAX_REPLACEMENT: f64 = 50.0;
/// Below this no amplification is claimed: products of such numbers would leave the range of a float.
pub const LEAST_DELTA: f64 = 1e-250;

/// Entries of all laws that one epsilon or delta computes, at most.
pub const MAX_WORK: usize = blocks::MAX_SWEEP
    + exact::MAX_SWEEPS * exact::MAX_REPEATED
    + (blocks::MORE_BLOCKS + 8) * (counts::MAX_COUNTS + 3 * blocks::KNOTS);

/// The chances of a one at a device's other coordinates (`q`) and at its own (`h`), and of a zero.
///
/// They define a mechanism. Python has the mechanisms (`chorister.privacy.randomizers`) and computes each number by
/// itself: one minus a number near one would lose its digits. The bound holds for any `q < h`.
#[derive(Clone, Copy, Debug)]
pub struct Chances {
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
    /// Returns them unless they contradict each other or are out of range.
    pub fn checked(self) -> Result<Self, Error> {
        let Self { q, not_q, h, not_h, gap, replacement } = self;
        let agree = |found: f64, wanted: f64| (found - wanted).abs() <= 8.0 * U;
        let in_range = q >= LEAST_CHANCE && not_h >= LEAST_CHANCE && gap >= LEAST_GAP;
        let consistent = agree(q + not_q, 1.0) && agree(h + not_h, 1.0) && agree(h - q, gap);
        let largest = (h / not_h).ln() + (not_q / q).ln();
        let guaranteed = largest <= replacement + 1e-12 && replacement <= MAX_REPLACEMENT;
        if in_range && consistent && guaranteed {
            return Ok(self);
        }
        Err(Error::InvalidInput(format!("these chances are not those of a mechanism: {self:?}")))
    }

    /// Whether zeros and ones play the same part (`h = 1 - q`), so that a sum's law is its own mirror image.
    #[must_use]
    #[expect(clippy::float_cmp, reason = "without all digits there is no mirror")]
    pub fn symmetric(&self) -> bool {
        self.h == self.not_q && self.not_h == self.q
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
