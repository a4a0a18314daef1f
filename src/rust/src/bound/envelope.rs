//! A pair of laws known by an upper bound on all its hockey-stick divergences.
//!
//! For laws P, Q and `g >= 0`, `H_g(P||Q) = sum (P - gQ)+` is convex and nonincreasing in g, and `H_0 = 1`. Values on a
//! grid, joined by chords, thus bound it from above at *every* g, and a convex bound is itself the curve of a pair: the
//! chord's change of slope at a knot is that pair's Q-mass with ratio g. `g < 1` (negative epsilon) is needed as much as
//! `g > 1`, or domination does not survive a product.
//!
//! Knots are `d = g - 1`; what is kept is the excess over the trivial floor `(1-g)+`, which has its relative precision.

use super::SLACK;
use super::internal;
use crate::error::Error;

/// Convex curve through knots in rising order, 0 among them: chords between, flat beyond.
#[derive(Clone, Debug)]
pub struct Envelope {
    pub knots: Vec<f64>,
    pub excess: Vec<f64>,
    /// Q-mass of the dominating pair at each knot.
    mass: Vec<f64>,
    /// Its Q-mass with ratio 0.
    at_zero: f64,
}

impl Envelope {
    /// The lower convex hull of upper bounds on some convex curve's excess at the knots.
    ///
    /// The curve lies below the bounds and is convex, so it lies below their hull, which leaves out what rounding (or
    /// a bound that is loose at one knot) raises above a chord. The floor has its kink at `d = 0`, where the
    /// curve's slope jumps by up to 1: the two sides have their hulls each, from `(g, H) = (0, 1)` and to a
    /// flat end. The curve's excess rises up to `d = 0` and falls beyond, so that the bounds may be made to.
    pub fn new(knots: &[f64], excess: &[f64]) -> Result<Self, Error> {
        if excess.iter().any(|value| !value.is_finite()) {
            return Err(internal("a divergence is not a number"));
        }
        let mut excess = excess.to_vec();
        let middle = knots.partition_point(|&d| d < 0.0);
        let (left, right) = excess.split_at_mut(middle);
        let lowered = |least: &mut f64, value: &mut f64| {
            *least = least.min(*value);
            *value = *least;
            Some(())
        };
        right.iter_mut().scan(f64::INFINITY, lowered).for_each(drop);
        left.iter_mut().rev().scan(f64::INFINITY, lowered).for_each(drop);
        let mut hull: Vec<(f64, f64)> = vec![(-1.0, 0.0)];
        for (&d, &value) in knots.iter().zip(&excess) {
            while let [.., (d0, e0), (d1, e1)] = *hull.as_slice() {
                // The knot at 0 stays, and so does the beginning.
                if d1 == 0.0 || (value - e1) * (d1 - d0) >= (e1 - e0) * (d - d1) {
                    break;
                }
                hull.pop();
            }
            hull.push((d, value));
        }
        let knots: Vec<f64> = hull.iter().skip(1).map(|knot| knot.0).collect();
        let excess: Vec<f64> = hull.iter().skip(1).map(|knot| knot.1).collect();
        let slopes: Vec<f64> = hull
            .windows(2)
            .filter_map(|pair| match pair {
                [(d0, e0), (d1, e1)] => Some((e1 - e0) / (d1 - d0)),
                _ => None,
            })
            .chain([0.0])
            .collect();
        let kink = |d: f64| if d == 0.0 { 1.0 } else { 0.0 };
        let mass = slopes
            .windows(2)
            .zip(&knots)
            .filter_map(|(pair, &d)| match pair {
                [left, right] => Some((right - left + kink(d)).max(0.0)),
                _ => None,
            })
            .collect();
        let at_zero = slopes.first().copied().unwrap_or(0.0).max(0.0);
        Ok(Self { knots, excess, mass, at_zero })
    }

    /// H of the dominating pair at ratios `1 + d` in rising order, fed to `take` with their index.
    fn divergences(&self, ratios: impl Iterator<Item = f64>, mut take: impl FnMut(usize, f64)) {
        let mut right = 0;
        for (index, d) in ratios.enumerate() {
            while self.knots.get(right).is_some_and(|&knot| knot < d) {
                right += 1;
            }
            let end = right.checked_sub(1).map_or((-1.0, 0.0), |left| self.knot(left));
            let excess = if right < self.knots.len() {
                let (d1, e1) = self.knot(right);
                end.1 + (e1 - end.1) * ((d - end.0) / (d1 - end.0))
            } else {
                end.1
            };
            take(index, excess + (-d).max(0.0));
        }
    }

    fn knot(&self, index: usize) -> (f64, f64) {
        let at = |side: &[f64]| side.get(index).copied().unwrap_or(f64::NAN);
        (at(&self.knots), at(&self.excess))
    }

    /// `e^eps g - 1` for each knot's g.
    fn reach(&self, epsilon: f64) -> impl Iterator<Item = f64> {
        let grown = epsilon.exp_m1();
        // Below -1/2 `1 + d` is exact.
        let times = move |d: &f64| {
            if *d > -0.5 { grown + d + grown * d } else { (grown + 1.0) * (1.0 + d) - 1.0 }
        };
        self.knots.iter().map(times)
    }

    /// Certified delta of the product with this pair's own reversal: both coordinates of a release.
    ///
    /// With (P, Q) at coordinate d and (Q, P) at d', `delta = sum_j Q_j H_{e^eps g_j}(P||Q)`.
    pub fn delta(&self, epsilon: f64) -> f64 {
        let mut delta = self.at_zero;
        self.divergences(self.reach(epsilon), |index, divergence| {
            delta += self.mass.get(index).copied().unwrap_or(f64::NAN) * divergence;
        });
        delta * (1.0 + SLACK)
    }

    /// How much `delta(epsilon)` rises with the curve at each of some knots (of which the hull's are a subset), to
    /// first order: what a sweep should care about, no part of any bound.
    ///
    /// Delta is bilinear in the curve: once through the divergences `H(e^eps g_j)` that the masses weigh, once
    /// through the masses, which are second differences of the curve.
    pub fn sensitivity(&self, epsilon: f64, knots: &[f64]) -> Vec<f64> {
        let size = self.knots.len();
        let mut weight = vec![0.0; size];
        let mut add = |index: usize, amount: f64| {
            if let Some(slot) = weight.get_mut(index) {
                *slot += amount;
            }
        };
        let mut right = 0;
        for (reach, &mass) in self.reach(epsilon).zip(&self.mass) {
            while self.knots.get(right).is_some_and(|&knot| knot < reach) {
                right += 1;
            }
            match (right.checked_sub(1), self.knots.get(right)) {
                (Some(left), Some(&above)) => {
                    let below = self.knot(left).0;
                    let share = (reach - below) / (above - below);
                    add(right, mass * share);
                    add(left, mass * (1.0 - share));
                }
                (Some(last), None) => add(last, mass),
                _ => {}
            }
        }
        let mut reached = Vec::with_capacity(size);
        self.divergences(self.reach(epsilon), |_, divergence| reached.push(divergence));
        let mut before = (-1.0, 1.0);
        let mut slope_before: Option<f64> = None;
        for (index, (&d, &phi)) in self.knots.iter().zip(&reached).enumerate() {
            let slope = (phi - before.1) / (d - before.0);
            if let (Some(left), Some(previous)) = (slope_before, index.checked_sub(1)) {
                add(previous, (slope - left).max(0.0));
            }
            slope_before = Some(slope);
            before = (d, phi);
        }
        if let (Some(slope), Some(last)) = (slope_before, size.checked_sub(1)) {
            add(last, (-slope).max(0.0));
        }
        // On all knots: those that the hull left out count for nothing.
        let mut own = self.knots.iter().zip(weight).peekable();
        knots
            .iter()
            .map(|&d| own.next_if(|(knot, _)| **knot == d).map_or(0.0, |(_, weight)| weight))
            .collect()
    }
}

/// Least epsilon in `[0, upper]` at which `delta_at` is at most `delta`, from above.
///
/// The upper end is tested first and is the answer if it fails: it must hold for other reasons (pure differential
/// privacy). `ln delta` is nearly quadratic in epsilon, so a secant in it converges in a few steps; bisection
/// guards it. The returned value was itself tested.
pub fn least_epsilon(
    delta_at: impl Fn(f64) -> f64,
    delta: f64,
    upper: f64,
    precision: f64,
) -> Result<f64, Error> {
    let at = |epsilon: f64| {
        let value = delta_at(epsilon);
        if value.is_nan() { Err(internal("a delta is not a number")) } else { Ok(value) }
    };
    if at(upper)? > delta {
        return Ok(upper);
    }
    let gap_of = |value: f64| if value > 0.0 { value.ln() - delta.ln() } else { -745.0 };
    let mut low_gap = gap_of(at(0.0)?);
    if low_gap <= 0.0 {
        return Ok(0.0);
    }
    let (mut low, mut high, mut high_gap) = (0.0, upper, None);
    let mut guess = upper / 2.0;
    for step in 1..400 {
        if high - low <= precision * high {
            return Ok(high);
        }
        let gap = gap_of(at(guess)?);
        if gap <= 0.0 {
            (high, high_gap) = (guess, Some(gap));
        } else {
            (low, low_gap) = (guess, gap);
        }
        let width = high - low;
        guess = match high_gap {
            Some(high_gap) if step % 3 != 0 => {
                // Aim a little beyond the secant's root, so that the bracket closes from both sides.
                let aim = low + low_gap / (low_gap - high_gap) * width;
                let nudge = (precision * high / 4.0).max(1e-3 * width);
                let aim = if gap > 0.0 { aim + nudge } else { aim - nudge };
                aim.clamp(low + width * 1e-4, high - width * 1e-4)
            }
            _ => low.midpoint(high),
        };
    }
    Err(internal("the search for epsilon did not converge"))
}
