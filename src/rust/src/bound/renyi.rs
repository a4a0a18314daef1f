//! Renyi divergences of a sum of one-hot reports, certified over every composition of the crowd.
//!
//! `D_alpha(P||Q) = ln(sum Q (P/Q)^alpha) / (alpha - 1)` adds up over the two coordinates that change and obeys
//! post-processing, so the blocks of `blocks` bound it too: the maximum over blocks that cover `0..N`. One composition
//! alone is *not* the worst case for large orders (up to 45% too low).
//!
//! **Tails.** High orders weigh events far beyond any fixed probability mass. The recurrence of `counts` gives Z with full
//! relative precision wherever it is needed. Let `[first, last]` be the window, `L = ln(top/bottom)` the largest
//! log-ratio, `Pr[Z <= first] <= e^-35` and `Pr[Z >= last] <= e^-(alpha L + 35)` by Chernoff's bound (or an end of the
//! support). Counts up to `first` have a ratio below 1 and weigh at most `e^-35` together; those above `last` weigh
//! at most `e^(alpha L)` times their chance. Twice `e^-35` is added, to a sum that is at least 1.
//!
//! **Rounding.** An error common to neighbouring entries of Z cancels in ratios and, with `alpha` and `alpha - 1`
//! of them, once more in the sum; what is left is a bound on an entry's relative error, times
//! `alpha / (alpha - 1) <= 2`. That and `SLACK` are added to every divergence.

use super::blocks::least_width;
use super::counts::{Count, Profile};
use super::{Chances, internal, others};
use crate::error::Error;

/// Largest order.
pub const MAX_ORDER: u32 = 20_000;
/// What is left out is below `e^-REST`.
const REST: f64 = 35.0;
/// Added to every divergence of a coordinate.
const SLACK: f64 = 1e-9;
/// Entries of one law; beyond that users are dropped, which only raises the divergence.
const MAX_COUNTS: u64 = 1 << 18;
/// Entries of all laws of a sweep, after which its blocks have their least width.
const MAX_SWEEP: u64 = 8_000_000;
/// Blocks may exceed the largest single composition by this fraction, or by more where laws are long.
const RISE: f64 = 5e-4;
/// Up to this many others, every k is a block of its own.
const INDIVIDUAL: u64 = 64;
const LN_UNIT: f64 = 200.0 * std::f64::consts::LN_2;

/// The chances of a one and of a zero.
type Bit = (f64, f64);

/// One coordinate: `Z + Ber(top)` against `Z + Ber(bottom)`, `top > bottom`, whatever Z's references and holders.
#[derive(Clone, Copy)]
struct Side {
    chances: Chances,
    top: Bit,
    bottom: Bit,
    order: u32,
}

impl Side {
    /// At the value that the device holds.
    fn gained(chances: Chances, order: u32) -> Self {
        let Chances { q, not_q, h, not_h, .. } = chances;
        Self { chances, top: (h, not_h), bottom: (q, not_q), order }
    }

    /// At another value. Counting zeros instead of ones turns B against A into the same shape.
    fn lost(chances: Chances, order: u32) -> Self {
        let Chances { q, not_q, h, not_h, .. } = chances;
        Self { chances: chances.flipped(), top: (not_q, q), bottom: (not_h, h), order }
    }

    /// The largest log-ratio.
    fn largest(&self) -> f64 {
        self.top.0.ln() - self.bottom.0.ln()
    }

    fn window(&self, count: &Count) -> (u64, u64) {
        let above = f64::from(self.order) * self.largest() + REST;
        let last = edge(count, above);
        let zeros = Count { chances: count.chances.flipped(), ..*count };
        (count.size() - edge(&zeros, REST), last)
    }

    /// The divergence, from above, and the entries that were computed for it.
    fn divergence(&self, references: u64, holders: u64) -> Result<(f64, u64), Error> {
        let count = Count { references, holders, chances: self.chances }.reduced(|count| {
            let (first, last) = self.window(count);
            last - first < MAX_COUNTS
        });
        let (first, last) = self.window(&count);
        let profile = count.profile(first, last)?;
        let order = f64::from(self.order);
        let rest = 2.0 * (-REST).exp();
        let log_moment = if order * self.largest() < 250.0 {
            (self.moment(&profile) + rest).ln()
        } else {
            let log_moment = self.log_moment(&profile);
            log_moment + (rest * (-log_moment).exp()).ln_1p()
        };
        let value = log_moment.max(0.0) / (order - 1.0) + SLACK + 2.0 * profile.error;
        if value.is_finite() {
            return Ok((value, last - first + 1));
        }
        Err(internal("a Renyi divergence is not a number"))
    }

    /// P and Q at a count, in whatever unit Z is given at the count and below it.
    fn laws(&self, here: f64, before: f64) -> (f64, f64) {
        let law = |bit: Bit| bit.1 * here + bit.0 * before;
        (law(self.top), law(self.bottom))
    }

    /// `sum Q (P/Q)^order` where no term leaves the range of a float: entries below `2^-1200` of the largest are
    /// far below what counts.
    fn moment(&self, profile: &Profile) -> f64 {
        let top = profile.top();
        let (mut total, mut sum, mut before) = (0.0, 0.0, 0.0);
        let mut add = |here: f64, before: f64| {
            let (p, q) = self.laws(here, before);
            if q > 0.0 {
                sum += q * (p / q).powi(self.order as i32);
            }
        };
        for (run, unit) in profile.each_run() {
            let scale = f64::from(200 * (unit - top).max(-6)).exp2();
            for entry in run {
                let here = entry * scale;
                total += here;
                add(here, before);
                before = here;
            }
        }
        add(0.0, before);
        sum / total
    }

    /// The logarithm of the same sum for any order.
    fn log_moment(&self, profile: &Profile) -> f64 {
        let order = f64::from(self.order);
        let top = profile.top();
        let mut logs = Vec::with_capacity(profile.mass.len() + 1);
        let (mut total, mut before) = (0.0, 0.0);
        let mut last_unit = top;
        let mut add = |here: f64, before: f64, unit: i32| {
            let (p, q) = self.laws(here, before);
            let log = order * p.ln() - (order - 1.0) * q.ln();
            logs.push(log + LN_UNIT * f64::from(unit - top));
        };
        for (run, unit) in profile.each_run() {
            // What lies below, in this run's unit.
            before *= f64::from(200 * (last_unit - unit)).exp2();
            let scale = f64::from(200 * (unit - top).max(-6)).exp2();
            for &here in run {
                total += here * scale;
                add(here, before, unit);
                before = here;
            }
            last_unit = unit;
        }
        add(0.0, before, last_unit);
        let largest = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logs.iter().map(|log| (log - largest).exp()).sum();
        largest + sum.ln() - f64::ln(total)
    }
}

/// The least count found with `ln Pr[Z >= count] <= -rest`, or the end of the support.
///
/// Chernoff: `ln Pr[Z >= m] <= K(t) - t m`, where `K(t) = ln E e^(tZ)` and `m = K'(t)` makes it smallest. A margin of 1
/// is far more than rounding.
fn edge(count: &Count, rest: f64) -> u64 {
    let Chances { q, not_q, h, not_h, .. } = count.chances;
    let (a, b) = (count.references as f64, count.holders as f64);
    let at = |t: f64| {
        let grown = t.exp_m1();
        let mean = |one: f64, zero: f64| one * t.exp() / (zero + one * t.exp());
        let m = a * mean(q, not_q) + b * mean(h, not_h);
        (m, t * m - a * (q * grown).ln_1p() - b * (h * grown).ln_1p())
    };
    let (mut low, mut high) = (0.0, 64.0);
    if at(high).1 < rest + 1.0 {
        return count.size();
    }
    for _ in 0..50 {
        let middle = f64::midpoint(low, high);
        if at(middle).1 < rest + 1.0 {
            low = middle;
        } else {
            high = middle;
        }
    }
    (at(high).0.ceil() as u64).min(count.size())
}

/// Maximum of a side's divergence over blocks that cover `0..=others`, as distances from the worst k.
fn worst(others: u64, side: &Side) -> Result<f64, Error> {
    let symmetric = side.chances.symmetric();
    let mut work = 0;
    let block = |first: u64, last: u64, work: &mut u64| -> Result<f64, Error> {
        let (references, holders) =
            if symmetric { (first, others - last) } else { (others - last, first) };
        let (value, entries) = side.divergence(references, holders)?;
        *work += entries;
        Ok(value)
    };
    // By a single composition; by the blocks.
    let mut attained = block(0, 0, &mut work)?;
    let mut bound = attained;
    let entries = work as usize;
    // Blocks of a share s of all users raise a divergence by s: no finer than can be afforded.
    let rise = f64::max(RISE, 2.0 * work as f64 / MAX_SWEEP as f64);
    let (mut first, mut width, mut growth) = (1, 1.0_f64, 2.0_f64);
    while first <= others {
        let (value, last) = loop {
            let room = MAX_SWEEP.saturating_sub(work) as usize;
            let least = least_width(first, others - first + 1, others, entries, room);
            let chosen = if others <= INDIVIDUAL { 1 } else { (width as u64).max(least) };
            let last = others.min(first.saturating_add(chosen - 1));
            let value = block(first, last, &mut work)?;
            if last == first {
                attained = attained.max(value);
            }
            if last - first < least || value <= attained * (1.0 + rise) {
                break (value, last);
            }
            // Higher than anything so far: is that the block's width or its members?
            for single in [first, last] {
                attained = attained.max(block(single, single, &mut work)?);
            }
            if value <= attained * (1.0 + rise) {
                break (value, last);
            }
            (width, growth) = ((width / growth).max(1.0), (1.0 + (growth - 1.0) / 2.0).max(1.1));
        };
        if value <= attained {
            growth = (1.3 * growth).min(2.0);
        }
        bound = bound.max(value);
        width *= growth;
        first = last + 1;
    }
    Ok(bound)
}

/// `D_order` of one release: the sum over its two coordinates, each over the worst crowd.
pub fn divergence(cohort: u64, chances: Chances, order: u32, noised: bool) -> Result<f64, Error> {
    let (others, chances) = (others(cohort)?, chances.checked()?);
    check_order(order)?;
    let (gained, lost) = (Side::gained(chances, order), Side::lost(chances, order));
    if noised {
        return Ok(gained.divergence(others, 0)?.0 + lost.divergence(others, 0)?.0);
    }
    if chances.symmetric() {
        // Pair N-k is the reversal of pair k, so both coordinates have the same worst case.
        return Ok(2.0 * worst(others, &gained)?);
    }
    Ok(worst(others, &gained)? + worst(others, &lost)?)
}

/// `D_order` of the witness: cheap, no bound; it shows which orders are worth a sweep.
pub fn witness(cohort: u64, chances: Chances, order: u32, noised: bool) -> Result<f64, Error> {
    let (others, chances) = (others(cohort)?, chances.checked()?);
    check_order(order)?;
    let gained = Side::gained(chances, order);
    if chances.symmetric() && !noised {
        return Ok(2.0 * gained.divergence(0, others)?.0);
    }
    Ok(gained.divergence(others, 0)?.0 + Side::lost(chances, order).divergence(others, 0)?.0)
}

fn check_order(order: u32) -> Result<(), Error> {
    if (2..=MAX_ORDER).contains(&order) {
        return Ok(());
    }
    Err(Error::InvalidInput(format!(
        "a Renyi order must be an integer from 2 to {MAX_ORDER}, not {order}"
    )))
}
