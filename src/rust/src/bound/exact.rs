//! Epsilon and delta of one release, certified from above, with a witness below.
//!
//! *Honest crowd*: everybody's data but the device's own are arbitrary, so the bound is a supremum over all compositions
//! (k, k') of the others at the two coordinates that change. The envelope X* of `blocks` dominates every k at one
//! coordinate, its reversal Y* every k' at the other, and the product X* x Y* every (k, k'): a **certified upper bound**.
//! One composition, (0, 0) for asymmetric and (N, 0) for symmetric one-hot, is a **witness**: a lower bound on the truth.
//! On large cohorts they agree to some 1e-5; on tiny ones the witness can lie far below. Only the upper bound is
//! enforced.
//!
//! *Noised crowd*: each aggregator adds Bin(M, q), M = cohort - 1, to every bin. If one aggregator is honest the device's
//! coordinates see the pair with M references and no holders whoever the other clients are: a **single pair**, no
//! supremum, lower = upper but for rounding.
//!
//! **Tuning.** An envelope's blocks are narrow where that matters for one epsilon. The witness's is a good guess for
//! large cohorts; on tiny ones it is far from the answer, so the sweep is repeated around the answer that it gave until
//! that no longer helps, and the least certified value is returned. Each is a bound.

use super::blocks::Crowd;
use super::envelope::{Envelope, least_epsilon};
use super::pair::Pair;
use super::{Chances, LEAST_DELTA, internal, others};
use crate::error::Error;

const PRECISION: f64 = 1e-9;
/// Sweeps of one call, at most.
pub const MAX_SWEEPS: usize = 4;
/// A sweep whose laws have more entries than this is not repeated.
pub const MAX_REPEATED: usize = 8_000_000;

/// A sweep is repeated where epsilon turns out larger by this factor than it was tuned for.
const RETUNED: f64 = 1.03;

/// A value between a witness and a certified bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exact {
    /// No true value is smaller.
    pub lower: f64,
    /// Certified: no true value is larger.
    pub upper: f64,
}

/// What stays fixed while epsilon and delta vary.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    others: u64,
    chances: Chances,
    noised: bool,
}

/// The tail mass that a window may leave out when `delta` is what matters.
fn cut_for(delta: f64) -> f64 {
    (delta * 1e-9).max(1e-260)
}

impl Setting {
    pub fn new(cohort: u64, chances: Chances, noised: bool) -> Result<Self, Error> {
        Ok(Self { others: others(cohort)?, chances: chances.checked()?, noised })
    }

    /// Both coordinates with `held` others at the device's value and `instead` at the other one.
    fn composition(&self, held: u64, instead: u64, cut: f64) -> Result<(Pair, Pair), Error> {
        let pair = |holders: u64| match self.others.checked_sub(holders) {
            Some(references) => Pair::new(references, holders, self.chances, cut),
            None => Err(Error::InvalidInput(format!(
                "{holders} others can't hold a value in a cohort of {}",
                self.others + 1
            ))),
        };
        Ok((pair(held)?, pair(instead)?))
    }

    /// The witness's composition, or for a noised crowd the only one.
    fn witness(&self, cut: f64) -> Result<(Pair, Pair), Error> {
        let symmetric = self.chances.symmetric() && !self.noised;
        self.composition(if symmetric { self.others } else { 0 }, 0, cut)
    }

    /// Delta of one composition of the crowd, neither from above nor from below: for comparisons.
    pub fn composition_delta(&self, held: u64, instead: u64, epsilon: f64) -> Result<f64, Error> {
        check_epsilon(epsilon)?;
        let (mut cut, mut value) = (1e-18, 0.0);
        // Two passes: the second window is cut for the size of the answer.
        for _ in 0..2 {
            let (gained, lost) = self.composition(held, instead, cut)?;
            value = gained.delta(&lost, epsilon).value;
            cut = cut_for(value.max(1e-30));
        }
        Ok(value)
    }

    /// The witness's delta.
    pub fn witness_delta(&self, epsilon: f64) -> Result<f64, Error> {
        let symmetric = self.chances.symmetric() && !self.noised;
        self.composition_delta(if symmetric { self.others } else { 0 }, 0, epsilon)
    }

    /// Epsilon of one release at `delta`.
    pub fn epsilon(&self, delta: f64) -> Result<Exact, Error> {
        check_delta(delta)?;
        let limit = self.chances.replacement;
        if delta < LEAST_DELTA {
            return Ok(Exact { lower: 0.0, upper: limit });
        }
        let (gained, lost) = self.witness(cut_for(delta))?;
        let below = |epsilon: f64| gained.delta_below(&lost, epsilon);
        // Anything below the least epsilon is below the truth.
        let lower = least_epsilon(below, delta, limit, PRECISION)? * (1.0 - 2.0 * PRECISION);
        let upper = if self.noised {
            least_epsilon(|e| gained.delta_above(&lost, e), delta, limit, PRECISION)?
        } else {
            drop((gained, lost));
            self.honest_epsilon(delta, lower)?
        };
        certified(lower, upper)
    }

    fn honest_epsilon(&self, delta: f64, witness: f64) -> Result<f64, Error> {
        let limit = self.chances.replacement;
        let crowd = Crowd::new(self.others, self.chances, cut_for(delta))?;
        let (mut around, mut epsilon, mut best) = (crowd.first_idea()?, witness, limit);
        for _ in 0..MAX_SWEEPS {
            let (found, work) = crowd.envelope(&crowd.tuning(&around, epsilon, delta))?;
            let tuned_for = epsilon;
            epsilon = least_epsilon(|e| found.delta(e), delta, limit, PRECISION)?;
            around = found;
            best = best.min(epsilon);
            // Near what it was tuned for a sweep can hardly be improved.
            if epsilon <= tuned_for * RETUNED || work > MAX_REPEATED || crowd.is_individual() {
                break;
            }
        }
        Ok(best)
    }

    /// Delta of one release at `epsilon`.
    pub fn delta(&self, epsilon: f64) -> Result<Exact, Error> {
        check_epsilon(epsilon)?;
        if epsilon >= self.chances.replacement {
            return Ok(Exact { lower: 0.0, upper: 0.0 });
        }
        let seen = self.witness_delta(epsilon)?;
        let (gained, lost) = self.witness(cut_for(seen.max(LEAST_DELTA)))?;
        let lower = gained.delta_below(&lost, epsilon);
        let upper = if self.noised {
            gained.delta_above(&lost, epsilon)
        } else {
            drop((gained, lost));
            self.honest_delta(epsilon, seen.max(LEAST_DELTA))?
        };
        certified(lower, upper.min(1.0))
    }

    fn honest_delta(&self, epsilon: f64, witness: f64) -> Result<f64, Error> {
        let crowd = Crowd::new(self.others, self.chances, cut_for(witness))?;
        let (mut around, mut delta, mut best) = (crowd.first_idea()?, witness, f64::INFINITY);
        for _ in 0..MAX_SWEEPS {
            let (found, work) = crowd.envelope(&crowd.tuning(&around, epsilon, delta))?;
            let tuned_for = delta;
            delta = found.delta(epsilon);
            around = found;
            best = best.min(delta);
            if delta <= 2.0 * tuned_for || work > MAX_REPEATED || crowd.is_individual() {
                break;
            }
        }
        Ok(best)
    }

    /// The dominating pair of one coordinate, tight around `delta`, for compositions.
    pub fn envelope(&self, delta: f64) -> Result<Envelope, Error> {
        check_delta(delta)?;
        let delta = delta.max(LEAST_DELTA);
        if self.noised {
            return Crowd::single(self.others, self.chances, cut_for(delta));
        }
        let crowd = Crowd::new(self.others, self.chances, cut_for(delta))?;
        let idea = crowd.first_idea()?;
        let limit = self.chances.replacement;
        let epsilon = least_epsilon(|e| idea.delta(e), delta, limit, 1e-4)?;
        Ok(crowd.envelope(&crowd.tuning(&idea, epsilon, delta))?.0)
    }
}

fn check_delta(delta: f64) -> Result<(), Error> {
    if delta > 0.0 && delta < 1.0 {
        return Ok(());
    }
    Err(Error::InvalidInput(format!("delta must lie strictly between 0 and 1, not {delta}")))
}

fn check_epsilon(epsilon: f64) -> Result<(), Error> {
    // A ratio below 1 is of use in tests of products; e^50 is far beyond any local epsilon.
    if (-50.0..=50.0).contains(&epsilon) {
        return Ok(());
    }
    Err(Error::InvalidInput(format!("epsilon must lie between -50 and 50, not {epsilon}")))
}

fn certified(lower: f64, upper: f64) -> Result<Exact, Error> {
    if lower.is_finite() && upper.is_finite() && upper >= lower {
        return Ok(Exact { lower, upper });
    }
    Err(internal(&format!("certified {upper} below witness {lower}")))
}
