//! One coordinate of a sum, before and after one device changes its value, and all its divergences.
//!
//! When a device replaces `d` by `d'`, only these two coordinates of the sum change their law, and they are independent
//! given everybody's data. At coordinate `d`, with `Z` the others' count there,
//!
//! ```text
//! A = Z + Ber(h) if the device holds d,   B = Z + Ber(q) if it does not.
//! ```
//!
//! `Z` is log-concave, so the ratio `A/B` rises with the count, and every hockey-stick divergence
//! `H_g(A||B) = sum (A - gB)+` is attained on an upper tail.
//!
//! Ratios are kept as `d = g - 1`, which has all its digits where a large crowd brings `g` close to 1.

use super::counts::{Count, Law};
use super::{Chances, SLACK, U};
use crate::error::Error;

/// A against B. Index `i` stands for the count `law.first + i`; A and B reach one count further than Z.
pub struct Pair {
    chances: Chances,
    law: Law,
    /// `Pr[Z >= count]`, summed from the top.
    upper: Vec<f64>,
    /// `Pr[Z < count]`, summed from the bottom.
    lower: Vec<f64>,
}

/// A computed number and a bound on its rounding error.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rounded {
    pub value: f64,
    pub error: f64,
}

impl Pair {
    pub fn new(references: u64, holders: u64, chances: Chances, cut: f64) -> Result<Self, Error> {
        let law = Count { references, holders, chances }.law(cut)?;
        let mut lower = Vec::with_capacity(law.mass.len() + 1);
        let mut sum = 0.0;
        lower.push(0.0);
        lower.extend(law.mass.iter().map(|mass| {
            sum += mass;
            sum
        }));
        let mut upper = vec![0.0; law.mass.len() + 1];
        sum = 0.0;
        for (above, mass) in upper.iter_mut().zip(&law.mass).rev() {
            sum += mass;
            *above = sum;
        }
        Ok(Self { chances, law, upper, lower })
    }

    /// The number of counts of A and B.
    pub fn counts(&self) -> usize {
        self.law.mass.len() + 1
    }

    fn here(&self, count: usize) -> f64 {
        self.law.mass.get(count).copied().unwrap_or(0.0)
    }

    fn before(&self, count: usize) -> f64 {
        count.checked_sub(1).map_or(0.0, |below| self.here(below))
    }

    /// B at a count.
    pub fn reference_mass(&self, count: usize) -> f64 {
        self.chances.not_q * self.here(count) + self.chances.q * self.before(count)
    }

    /// `A/B - 1` at a count; nondecreasing.
    pub fn ratio(&self, count: usize) -> f64 {
        let (here, before) = (self.here(count), self.before(count));
        self.chances.gap * (before - here) / (self.chances.not_q * here + self.chances.q * before)
    }

    /// `e^eps A/B - 1` at a count, `grown = e^eps - 1`, to full relative precision of `e^eps A/B` and near 1 of
    /// the difference.
    fn ratio_times(&self, count: usize, grown: f64) -> f64 {
        let ratio = self.ratio(count);
        if ratio > -0.5 {
            return grown + ratio + grown * ratio;
        }
        let own = self.chances.not_h * self.here(count) + self.chances.h * self.before(count);
        (grown + 1.0) * (own / self.reference_mass(count)) - 1.0
    }

    /// The first count from `start` on with `A > gB`, `g = 1 + d`, by a search that begins with small steps.
    fn first_above(&self, d: f64, start: usize) -> usize {
        let counts = self.counts();
        let (mut low, mut step) = (start, 1);
        while low + step <= counts && self.ratio(low + step - 1) <= d {
            low += step;
            step *= 2;
        }
        let mut high = (low + step - 1).min(counts);
        while low < high {
            let middle = low.midpoint(high);
            if self.ratio(middle) <= d {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    /// How far `H_g` exceeds its trivial floor `(1-g)+` if `t` is the first count with `A > gB`.
    ///
    /// That is `H_g = sum (A - gB)+` for `g >= 1` and `H_g - (1-g) = sum (gB - A)+` for `g < 1`. Each is summed on
    /// the tail where it lives, so it keeps its relative precision however small:
    ///
    /// ```text
    /// sum_{x>=t} A - gB = (h - gq) Z(t-1) - (g-1) Pr[Z >= t],
    /// sum_{x<t}  gB - A = (h - gq) Z(t-1) - (1-g) Pr[Z < t].
    /// ```
    fn excess_at(&self, d: f64, t: usize) -> Rounded {
        if t >= self.counts() {
            return Rounded::default(); // g is at least h/q: no count has A > gB
        }
        let before = self.before(t);
        let own = (self.chances.gap - d * self.chances.q) * before;
        let side = if d >= 0.0 { &self.upper } else { &self.lower };
        let tail = d.abs() * side.get(t).copied().unwrap_or(0.0);
        // The last term: near h/q, the largest ratio, the difference in `own` cancels.
        let cancelled = 8.0 * U * (self.chances.gap + d.abs() * self.chances.q) * before;
        let error = (self.law.error + 8.0 * U) * (own.abs() + tail) + cancelled;
        Rounded { value: (own - tail).max(0.0), error }
    }

    /// The excess at each of some ratios in rising order, from above: rounding and window counted in full.
    ///
    /// The window holds Z conditioned on it, an honest law of its own. Z is a mixture of that and of a rest of mass
    /// `missing`, and the divergence is convex: `missing` times the trivial ceiling `min(1, g)` covers the rest.
    pub fn excesses(&self, knots: &[f64]) -> Vec<f64> {
        let mut t = 0;
        let excess = |&d: &f64| {
            t = self.first_above(d, t);
            let found = self.excess_at(d, t);
            found.value + found.error + (1.0 + d.min(0.0)) * self.law.missing
        };
        knots.iter().map(excess).collect()
    }

    /// Delta, given the windows, of a release in which this pair is gained and `lost` lost.
    ///
    /// With A, B here and A', B' there, `delta = sum_x B'(x) H_{e^eps r'(x)}(A||B)`, `r' = A'/B'`.
    pub fn delta(&self, lost: &Self, epsilon: f64) -> Rounded {
        let grown = epsilon.exp_m1();
        let (mut value, mut error, mut t) = (0.0, 0.0, 0);
        for count in 0..lost.counts() {
            let mass = lost.reference_mass(count);
            let d = lost.ratio_times(count, grown);
            t = self.first_above(d, t);
            let found = self.excess_at(d, t);
            value += mass * (found.value + (-d).max(0.0));
            error += mass * found.error;
        }
        Rounded { value, error: error + (lost.law.error + 8.0 * U) * value }
    }

    /// A certified upper bound on that delta.
    ///
    /// Z is a mixture of its window's law and of a rest of mass `missing`, and delta is jointly convex: `missing` of
    /// either side, counted in full, covers the rests.
    pub fn delta_above(&self, lost: &Self, epsilon: f64) -> f64 {
        let found = self.delta(lost, epsilon);
        (found.value + found.error + self.law.missing + lost.law.missing) * (1.0 + SLACK)
    }

    /// A lower bound on that delta, 0 where users had to be dropped.
    ///
    /// Let S be the best event given the windows, without the counts that Z can also reach from outside of its
    /// window (one at each end that is not the support's). There the rests play no part, so `P(S) - e^eps Q(S)` is
    /// at least `(1 - missing - missing')` of the windows' value less P's mass on the counts taken away.
    pub fn delta_below(&self, lost: &Self, epsilon: f64) -> f64 {
        if !(self.law.whole && lost.law.whole) {
            return 0.0;
        }
        let found = self.delta(lost, epsilon);
        let kept = 1.0 - self.law.missing - lost.law.missing;
        let (h, not_h) = (self.chances.h, self.chances.not_h);
        let (q, not_q) = (lost.chances.q, lost.chances.not_q);
        let taken = self.edges(not_h, h) + lost.edges(not_q, q);
        (kept * (found.value - found.error) * (1.0 - SLACK) - taken).max(0.0)
    }

    /// The mass of `Z + Ber(one)` on the counts that Z can also reach from outside of its window.
    fn edges(&self, zero: f64, one: f64) -> f64 {
        let first = if self.law.from_start { 0.0 } else { zero * self.here(0) };
        let last = if self.law.to_end { 0.0 } else { one * self.before(self.counts() - 1) };
        first + last
    }
}
