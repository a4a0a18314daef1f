//! The law of a count `Z = Bin(references, q) + Bin(holders, h)`, to full relative precision.
//!
//! # The recurrence
//!
//! With `a` references and `b` holders the generating function `F(z) = (1-q+qz)^a (1-h+hz)^b` satisfies
//! `(1-q+qz)(1-h+hz) F' = (aq(1-h+hz) + bh(1-q+qz)) F`. Comparing coefficients of `z^x`, with `N = a + b`,
//!
//! ```text
//! (1-q)(1-h)(x+1) f(x+1) = D(x) f(x) + qh (N-x+1) f(x-1),
//! D(x) = q(1-h)(a-x) + h(1-q)(b-x).
//! ```
//!
//! `D` falls in x. Where `D(x) >= 0` a step upwards adds positive terms only; where `D(x) <= 0` so does a step
//! downwards, which is the same recurrence for the number of zeros. The two chains meet where `D` changes its sign.
//! So an entry costs a few multiplications, and its relative error grows by a few roundings a step:
//!
//! **Lemma.** *A step adds at most `24u` to the relative error.* The terms of `D` are each good to `4u`, and their
//! sizes add up to at most four times `S = (1-q)(1-h)(x+1) f(x+1)/f(x)`. For this let `T1 >= T2` be the sizes of
//! `D`'s terms, of opposite signs (else there is nothing to show). From `(x+1) f(x+1) = sum_i p_i Pr[Z_{-i} = x]` and
//! `(N-x) f(x) = sum_i (1-p_i) Pr[Z_{-i} = x]` follows
//!
//! ```text
//! q/(1-q) <= (x+1) f(x+1) / ((N-x) f(x)) <= h/(1-h),                                  (*)
//! ```
//!
//! so `S >= q(1-h)(N-x)`, and, as `S >= qh(N-x+1) f(x-1)/f(x)`, also `S >= q(1-h)x`. If `b < x <= a` then
//! `T1 = q(1-h)(a-x) <= S`. If `a < x <= b` then either `T2 <= T1/2`, so that `D >= T1/2` and `T1 <= 2S`, or
//! `T1 <= 2 T2 <= 2q(1-h)x <= 2S`. In both cases `T1 + T2 <= 4S`: at most `16u`, and 8 more roundings make the step. ∎
//!
//! **Where a chain starts.** A step maps the ratio `r(x-1) = f(x)/f(x-1)` to `r(x) = (D + E/r(x-1))/den`, which
//! reverses order. `Z` is a sum of Bernoullis, hence log-concave: `r(x) <= r(x-1)`. With `g(x)` the fixed point of the
//! step at `x` this means `r(x) <= g(x) <= r(x-1)`: a bracket of `r(s-1)` at any `s` is `[g(s), g(s-1)]`. The images of a
//! bracket's ends bracket the next ratio; the chain begins where they agree to `4e-15`, or at the end of the
//! support, where the first ratio is exact. (Between a step and its fixed point lie factors of
//! `-E/(den r^2)`, whose product over a stretch that ends `s` standard deviations from the meeting point is about
//! `e^(-s^2/2)`: nine of them suffice wherever the window ends.)

use super::{Chances, U};
use crate::error::Error;

/// Entries of one law, at most: what the window of a billion users needs at a delta of `1e-16`.
pub const MAX_COUNTS: usize = 360_000;

const STEP_ERROR: f64 = 24.0 * U;
const LARGE: f64 = 1.606_938_044_258_990_3e60; // 2^200
const UNIT: i32 = 200; // a unit is a factor of 2^200
/// Entries between two changes of the unit.
const CHUNK: usize = 2;
const AGREED: f64 = 4e-15;
const TRIMMED: f64 = 1e-280;

/// A run of a law's entries in proportion: `mass[i] * 2^(UNIT * unit)`, the unit of the run it lies in.
#[derive(Debug, Default)]
pub struct Profile {
    pub first: u64,
    pub mass: Vec<f64>,
    /// Where a run of one unit begins.
    pub runs: Vec<(usize, i32)>,
    /// Bound on the relative error of an entry.
    pub error: f64,
}

/// The law of a count on a window of it.
#[derive(Debug)]
pub struct Law {
    pub first: u64,
    /// Chances given that the count lies in the window; all are above 0.
    pub mass: Vec<f64>,
    /// Bound on the mass outside the window.
    pub missing: f64,
    /// Bound on the relative error of an entry, or of a sum of entries.
    pub error: f64,
    /// Whether the window begins and ends with the support.
    pub from_start: bool,
    pub to_end: bool,
    /// Whether no user was dropped.
    pub whole: bool,
}

/// `Z`, before any of its law is computed.
#[derive(Clone, Copy, Debug)]
pub struct Count {
    pub references: u64,
    pub holders: u64,
    pub chances: Chances,
}

impl Count {
    pub fn size(&self) -> u64 {
        self.references + self.holders
    }

    pub fn mean(&self) -> f64 {
        self.references as f64 * self.chances.q + self.holders as f64 * self.chances.h
    }

    pub fn variance(&self) -> f64 {
        let Chances { q, not_q, h, not_h, .. } = self.chances;
        self.references as f64 * q * not_q + self.holders as f64 * h * not_h
    }

    /// The number of zeros among the same bits.
    fn flipped(self) -> Self {
        Self { chances: self.chances.flipped(), ..self }
    }

    /// A window that misses at most `cut` of the mass on either side.
    ///
    /// Bernstein: `Pr[Z - mean >= s] <= exp(-s^2 / (2 (v + s/3)))`, which is `e^-c` at
    /// `s = c/3 + sqrt(c^2/9 + 2cv)`; the same below.
    pub fn window(&self, cut: f64) -> (u64, u64) {
        let c = -cut.ln();
        let reach = c / 3.0 + (c * c / 9.0 + 2.0 * c * self.variance()).sqrt() + 1.0;
        let first = (self.mean() - reach).floor().max(0.0) as u64;
        let last = ((self.mean() + reach).ceil() as u64).min(self.size());
        (first.min(last), last)
    }

    /// Fewer users in the same proportion, so that `fits` holds: dropping users never lowers a divergence.
    #[must_use]
    pub fn reduced(mut self, fits: impl Fn(&Self) -> bool) -> Self {
        while !fits(&self) && self.size() > 0 {
            self.references -= self.references.div_ceil(8);
            self.holders -= self.holders.div_ceil(8);
        }
        self
    }

    /// The law on a window that misses about `cut`; of fewer users if it would have too many entries.
    pub fn law(self, cut: f64) -> Result<Law, Error> {
        let fits = |count: &Self| {
            let (first, last) = count.window(cut);
            last - first < MAX_COUNTS as u64
        };
        let count = self.reduced(fits);
        let (first, last) = count.window(cut);
        let law = count.profile(first, last)?.law(2.0 * cut, count.size())?;
        Ok(Law { whole: count.size() == self.size(), ..law })
    }

    /// The entries from `first` to `last`, in proportion.
    pub fn profile(&self, first: u64, last: u64) -> Result<Profile, Error> {
        if first > last || last > self.size() {
            return Err(super::internal("a window outside the support"));
        }
        if self.references == 0 || self.holders == 0 {
            return Ok(self.one_binomial(first, last));
        }
        let meeting = self.meeting().clamp(first, last);
        let size = self.size();
        let mut profile = Chain::of(self, first, meeting)?;
        let above = Chain::of(&self.flipped(), size - last, size - meeting)?;
        profile.join(above)?;
        profile.first = first;
        Ok(profile)
    }

    /// The first count at which `D` is negative.
    fn meeting(&self) -> u64 {
        let Chances { q, not_q, h, not_h, .. } = self.chances;
        let (own, other) = (q * not_h, h * not_q);
        let (a, b) = (self.references as f64, self.holders as f64);
        // Counts less a count are exact, so that D has the right sign but where its terms cancel to all digits;
        // its zero, a quotient, is rounded and says only where to look.
        let negative = |x: u64| own * (a - x as f64) + other * (b - x as f64) < 0.0;
        let mut x = ((own * a + other * b) / (own + other)) as u64;
        while x > 0 && negative(x - 1) {
            x -= 1;
        }
        while x <= self.size() && !negative(x) {
            x += 1;
        }
        x
    }

    /// `f(x+1)/f(x)` of a binomial is exact but for rounding, so products run outwards from the mode.
    fn one_binomial(&self, first: u64, last: u64) -> Profile {
        let Chances { q, not_q, h, not_h, .. } = self.chances;
        let trials = self.size() as f64;
        let odds = if self.holders == 0 { q / not_q } else { h / not_h };
        let share = if self.holders == 0 { q } else { h };
        let mode = (((trials + 1.0) * share).floor() as u64).clamp(first, last);
        let mut below = Profile { mass: vec![1.0], runs: vec![(0, 0)], ..Profile::default() };
        for x in (first + 1..=mode).rev() {
            let x = x as f64;
            below.push(below.last() * x / (odds * (trials - x + 1.0)));
        }
        let mut profile = below.reversed();
        for x in mode..last {
            let x = x as f64;
            profile.push(profile.last() * odds * (trials - x) / (x + 1.0));
        }
        profile.first = first;
        profile.error = STEP_ERROR * (last - first + 1) as f64;
        profile
    }
}

impl Profile {
    fn last(&self) -> f64 {
        self.mass.last().copied().unwrap_or(0.0)
    }

    fn unit(&self) -> i32 {
        self.runs.last().map_or(0, |run| run.1)
    }

    /// Appends an entry given in the current unit.
    fn push(&mut self, mut value: f64) {
        let unit = self.unit();
        if value > LARGE {
            value /= LARGE;
            self.runs.push((self.mass.len(), unit + 1));
        } else if value < 1.0 / LARGE && value > 0.0 {
            value *= LARGE;
            self.runs.push((self.mass.len(), unit - 1));
        }
        self.mass.push(value);
    }

    /// The entries of each run, with its unit.
    pub fn each_run(&self) -> impl Iterator<Item = (&[f64], i32)> {
        let ends = self.runs.iter().skip(1).map(|run| run.0).chain([self.mass.len()]);
        self.runs
            .iter()
            .zip(ends)
            .filter_map(|(&(start, unit), end)| Some((self.mass.get(start..end)?, unit)))
    }

    fn reversed(mut self) -> Self {
        let size = self.mass.len();
        let ends = self.runs.iter().skip(1).map(|run| run.0).chain([size]);
        let runs: Vec<_> =
            self.runs.iter().zip(ends).map(|(run, end)| (size - end, run.1)).collect();
        self.runs = runs.into_iter().rev().collect();
        self.mass.reverse();
        self
    }

    /// Appends a chain of zeros that ends where this one does.
    fn join(&mut self, above: Self) -> Result<(), Error> {
        let factor = self.last() / above.last();
        let shift = self.unit() - above.unit();
        if !(factor.is_finite() && factor > 0.0) {
            return Err(super::internal("the chains of a count do not meet"));
        }
        let above = above.reversed();
        let size = self.mass.len();
        for (start, unit) in above.runs {
            self.runs.push(((size + start).saturating_sub(1).max(size), unit + shift));
        }
        self.mass.extend(above.mass.iter().skip(1).map(|value| value * factor));
        self.error += above.error;
        Ok(())
    }

    /// The largest unit of any run: the one that holds the mode, or the one below the one that does.
    pub fn top(&self) -> i32 {
        self.runs.iter().map(|run| run.1).max().unwrap_or(0)
    }

    /// Chances, given the window; entries below 1e-280 of the largest are cut off at either end.
    fn law(self, missing: f64, size: u64) -> Result<Law, Error> {
        let top = self.top();
        let mut mass = vec![];
        if self.runs.len() == 1 {
            mass = self.mass;
        } else {
            mass.reserve(self.mass.len());
            for (run, unit) in self.each_run() {
                let scale = f64::from(UNIT * (unit - top).max(-6)).exp2();
                mass.extend(run.iter().map(|value| value * scale));
            }
        }
        let largest = mass.iter().copied().fold(0.0, f64::max);
        if !(largest.is_finite() && largest > 0.0) {
            return Err(super::internal("a law without mass"));
        }
        let solid = |value: &f64| *value > TRIMMED * largest;
        let start = mass.iter().position(solid).unwrap_or(0);
        let stop = mass.iter().rposition(solid).map_or(0, |last| last + 1);
        let missing = missing + TRIMMED * (mass.len() - (stop - start)) as f64;
        mass.truncate(stop);
        mass.drain(..start);
        let total: f64 = mass.iter().sum();
        let inverse = 1.0 / total;
        mass.iter_mut().for_each(|value| *value *= inverse);
        // The total has the entries' error once more, and summing adds a rounding an entry.
        let error = 2.0 * self.error + 4.0 * U * mass.len() as f64;
        let first = self.first + start as u64;
        let to_end = first + mass.len() as u64 == size + 1;
        Ok(Law { first, mass, missing, error, from_start: first == 0, to_end, whole: true })
    }
}

/// One upward chain of the recurrence.
struct Chain {
    own: f64,   // q (1-h)
    other: f64, // h (1-q)
    both: f64,  // q h
    none: f64,  // (1-q) (1-h)
    a: f64,
    b: f64,
    size: f64,
}

impl Chain {
    /// The entries from `first` to `last`; `D` is at least 0 at every step.
    fn of(count: &Count, first: u64, last: u64) -> Result<Profile, Error> {
        let Chances { q, not_q, h, not_h, .. } = count.chances;
        let chain = Self {
            own: q * not_h,
            other: h * not_q,
            both: q * h,
            none: not_q * not_h,
            a: count.references as f64,
            b: count.holders as f64,
            size: count.size() as f64,
        };
        let reach = 16 + (1.2 * count.variance().sqrt()) as u64;
        let (ratio, steps) = if first == last { (0.0, 0) } else { chain.ratio(first, reach)? };
        let size = (last - first + 1) as usize;
        let mut profile = Profile { first, mass: vec![1.0; size], runs: vec![(0, 0)], error: 0.0 };
        let mut below = if ratio > 0.0 { 1.0 / ratio } else { 0.0 };
        let mut here = 1.0;
        let mut x = first as f64;
        let mut unit = 0;
        for (index, chunk) in profile.mass.chunks_mut(CHUNK).enumerate() {
            // A step changes an entry by a factor of less than 2^60 (*), so that entries stay within 2^320, and
            // within 2^960 where two chains are joined.
            if !(1.0 / LARGE..=LARGE).contains(&here) {
                let (scale, change) = if here > 1.0 { (1.0 / LARGE, 1) } else { (LARGE, -1) };
                (here, below, unit) = (here * scale, below * scale, unit + change);
                profile.runs.push((index * CHUNK, unit));
            }
            for entry in chunk {
                *entry = here;
                let inverse = 1.0 / (chain.none * (x + 1.0));
                let next = (chain.d(x) * here + chain.e(x) * below) * inverse;
                (below, here) = (here, next);
                x += 1.0;
            }
        }
        profile.error = STEP_ERROR * (steps + last - first + 2) as f64 + AGREED;
        Ok(profile)
    }

    /// `D(x)`: at least 0 by the choice of the chain's end, but for rounding.
    fn d(&self, x: f64) -> f64 {
        (self.own * (self.a - x) + self.other * (self.b - x)).max(0.0)
    }

    fn e(&self, x: f64) -> f64 {
        self.both * (self.size - x + 1.0)
    }

    fn step(&self, x: f64, ratio: f64) -> f64 {
        (self.d(x) + self.e(x) / ratio) / (self.none * (x + 1.0))
    }

    /// The ratio that a step leaves alone: the positive root of `den r^2 = D r + E`.
    fn fixed(&self, x: f64) -> f64 {
        let (d, e, den) = (self.d(x), self.e(x), self.none * (x + 1.0));
        (d + (d * d + 4.0 * den * e).sqrt()) / (2.0 * den)
    }

    /// `f(x)/f(x-1)` at `x = first` (0 at the end of the support), and how many steps its error has grown for.
    fn ratio(&self, first: u64, mut reach: u64) -> Result<(f64, u64), Error> {
        if first == 0 {
            return Ok((0.0, 0));
        }
        while reach < first {
            let start = (first - reach) as f64;
            let (mut low, mut high) =
                (self.fixed(start) * (1.0 - 8.0 * U), self.fixed(start - 1.0) * (1.0 + 8.0 * U));
            let mut x = start;
            while high - low > AGREED * high && x < first as f64 {
                (low, high) = (self.step(x, high), self.step(x, low));
                x += 1.0;
            }
            if high - low <= AGREED * high {
                while x < first as f64 {
                    high = self.step(x, high);
                    x += 1.0;
                }
                return Ok((high, reach));
            }
            reach = reach.saturating_mul(2);
        }
        // From the end of the support, exactly.
        let mut ratio = self.d(0.0) / self.none;
        for x in 1..first {
            ratio = self.step(x as f64, ratio);
        }
        if ratio.is_finite() && ratio > 0.0 {
            return Ok((ratio, first));
        }
        Err(super::internal("a ratio of neighbouring chances is not a number"))
    }
}
