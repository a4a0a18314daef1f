//! Every composition of a crowd at one coordinate, dominated by one envelope.
//!
//! The others' data enter a coordinate through one number: `k`, how many of the `N` others hold its value. Dropping a
//! user never lowers a divergence (adding the user's bits back is a post-processing), so for every k in `[K1, K2]` pair k
//! is a post-processing of the pair with `N - K2` references and `K1` holders: a *block*. Blocks that cover `0..N` without
//! a gap bound every k; their maximum on a grid of ratios, joined by chords, is an envelope that dominates them all.
//!
//! Which widths are worth their price is decided by what matters: the derivative of the final delta with respect to the
//! envelope at each knot. A block is narrowed if it would raise delta by more than its share, down to a least width;
//! a block of the least width is merged whatever it does, never skipped. Whatever the widths, the bound is sound.
//!
//! # Work
//!
//! Up to `INDIVIDUAL` others every k is a block of its own. Beyond, widths are tried, narrowed and tried again, but no
//! block is narrower than `least_width`: so wide that the laws which the rest of the crowd still needs have, with
//! those computed so far, about `MAX_SWEEP` entries. Should that run out nevertheless, less than `MORE_BLOCKS` cover the rest.

use super::envelope::Envelope;
use super::pair::Pair;
use super::{Chances, U, internal};
use crate::error::Error;

/// Crowds of up to this many others are examined k by k.
const INDIVIDUAL: u64 = 160;
/// Crowds of up to this many others have a knot at every ratio of every k.
const EVERY_RATIO: u64 = 32;
/// Entries of all laws of a sweep, after which its blocks have their least width.
pub const MAX_SWEEP: usize = 24_000_000;
/// Blocks that cover any crowd once that is spent.
pub const MORE_BLOCKS: usize = 113;
/// About 120 per standard deviation of the loss: chords cost `5e-6` of epsilon.
pub const KNOTS: usize = 2000;
/// Between the window's last ratio and the largest possible one.
const TAIL_KNOTS: usize = 48;

/// What a crowd's envelope is computed from, and what its sweep is tuned for.
pub struct Crowd {
    chances: Chances,
    others: u64,
    /// Tail mass that a window may leave out.
    cut: f64,
    knots: Vec<f64>,
    /// An envelope of one block only, the one that is the worst in most crowds.
    base: Vec<f64>,
    window: usize,
}

/// Where a sweep should be tight.
pub struct Tuning {
    /// Weight of a rise at each knot in delta.
    weight: Vec<f64>,
    /// By how much all blocks together may raise delta.
    budget: f64,
    /// The first block's width.
    width: f64,
}

impl Crowd {
    pub fn new(others: u64, chances: Chances, cut: f64) -> Result<Self, Error> {
        let worst = block(others, chances, cut, 0, 0)?;
        let knots = if others <= EVERY_RATIO {
            let mut pairs = vec![];
            for k in 0..=others {
                pairs.push(Pair::new(others - k, k, chances, cut)?);
            }
            knots_of(pairs.iter().flat_map(logs).collect(), chances.symmetric())
        } else {
            knots_of(thinned(&logs(&worst), others), chances.symmetric())
        };
        let base = merged(worst.excesses(&knots), &knots, chances.symmetric());
        Ok(Self { chances, others, cut, knots, base, window: worst.counts() })
    }

    /// The envelope of a single pair: exact, with every ratio a knot, where it has few enough.
    pub fn single(others: u64, chances: Chances, cut: f64) -> Result<Envelope, Error> {
        let pair = Pair::new(others, 0, chances, cut)?;
        let logs = logs(&pair);
        let chosen = if logs.len() <= KNOTS { logs } else { thinned(&logs, others) };
        let knots = knots_of(chosen, false);
        Envelope::new(&knots, &pair.excesses(&knots))
    }

    /// Whether every k is a block of its own, so that no tuning can help.
    pub fn is_individual(&self) -> bool {
        self.others <= INDIVIDUAL
    }

    /// The envelope of the worst block alone: a first estimate of the answer, not a bound.
    pub fn first_idea(&self) -> Result<Envelope, Error> {
        Envelope::new(&self.knots, &self.base)
    }

    /// A tuning for `epsilon`, around an envelope that is near the answer.
    pub fn tuning(&self, around: &Envelope, epsilon: f64, delta: f64) -> Tuning {
        let weight = around.sensitivity(epsilon, &self.knots);
        // By how much all blocks together may raise delta, relatively.
        let wanted = if self.chances.symmetric() { 2e-3 } else { 2e-4 };
        // Where holders and references are nearly alike every k costs the same: a block of a share s of all users
        // raises epsilon by s/2, and delta (as the sweep sees it) by about s ln(1/delta)/4. There can be no more
        // blocks than are affordable.
        let local = self.chances.replacement.min(1.0);
        let alike = (wanted / (local * local)).min(1e-2);
        let slope = 4.0 - delta.ln();
        let least = 0.5 * slope * (self.window + KNOTS) as f64 / MAX_SWEEP as f64;
        let uniform = self.chances.symmetric() || local < 1.0;
        let share = if uniform { alike.max(least) } else { alike };
        let budget = share * delta.max(around.delta(epsilon));
        let width = (self.others as f64 * share / (4.0 * slope)).max(1.0);
        Tuning { weight, budget, width }
    }

    /// An envelope of every k in `0..=others`.
    ///
    /// Also returns the entries of all laws that were computed.
    pub fn envelope(&self, tuning: &Tuning) -> Result<(Envelope, usize), Error> {
        let mut sweep = Sweep {
            crowd: self,
            tuning,
            excess: self.base.clone(),
            covered: 1,
            width: tuning.width,
            growth: 2.0,
            budget: tuning.budget,
            rest: 0,
            work: 0,
        };
        // Symmetric one-hot is its own mirror: `Z_{N-k} = N - Z_k` turns pair N-k into the reversal of pair k, so half
        // of the range suffices once every curve is merged with its own reversal.
        let end = if self.chances.symmetric() { self.others / 2 } else { self.others };
        while sweep.covered <= end {
            sweep.advance(end)?;
        }
        Ok((Envelope::new(&self.knots, &sweep.excess)?, sweep.work))
    }
}

/// The least width of a block that begins so far from the worst k, with `left` distances to cover and laws of
/// `entries` entries each, `room` in all: a share of the distance, or of what is left.
///
/// Without room a width is at least `min(first/3, others/40)`, so that at most `ln(N)/ln(4/3) + 40 < MORE_BLOCKS` blocks
/// reach the end from any `first` on.
pub(super) fn least_width(first: u64, left: u64, others: u64, entries: usize, room: usize) -> u64 {
    let affordable = (room / entries.max(1)).max(1) as u64;
    (first / 3).min(left / affordable).min(others / 40).max(1)
}

/// Blocks after the first, as distances from the worst k (0, or N for symmetric).
struct Sweep<'a> {
    crowd: &'a Crowd,
    tuning: &'a Tuning,
    excess: Vec<f64>,
    /// All distances below are covered.
    covered: u64,
    width: f64,
    growth: f64,
    budget: f64,
    /// How many of the next blocks stay as wide as the last.
    rest: u32,
    work: usize,
}

impl Sweep<'_> {
    /// Merges one more block.
    fn advance(&mut self, end: u64) -> Result<(), Error> {
        let Crowd { chances, others, cut, knots, window, .. } = self.crowd;
        let first = self.covered;
        let floor = self.tuning.budget / 100.0; // so that the last blocks are not starved
        let allowed = (self.budget / 2.0).max(floor);
        loop {
            let (entries, room) = (window + knots.len(), MAX_SWEEP.saturating_sub(self.work));
            let least = least_width(first, end - first + 1, *others, entries, room);
            let width = if *others <= INDIVIDUAL { 1 } else { (self.width as u64).max(least) };
            let last = end.min(first.saturating_add(width - 1));
            let pair = block(*others, *chances, *cut, first, last)?;
            self.work += pair.counts() + knots.len();
            let excess = merged(pair.excesses(knots), knots, chances.symmetric());
            let rise: f64 = self
                .tuning
                .weight
                .iter()
                .zip(excess.iter().zip(&self.excess))
                .map(|(weight, (new, old))| weight * (new - old).max(0.0))
                .sum();
            if last - first >= least && rise > allowed {
                // Growing fast again at once would be refused again: grow gently from here.
                self.width = (self.width / self.growth).max(1.0);
                self.growth = (1.0 + (self.growth - 1.0) / 2.0).max(1.1);
                self.rest = 6;
                continue;
            }
            if !rise.is_finite() {
                return Err(internal("a block's rise is not a number"));
            }
            if rise < allowed / 8.0 {
                self.growth = (1.3 * self.growth).min(2.0);
            }
            self.budget -= rise.min(self.budget / 2.0);
            for (old, new) in self.excess.iter_mut().zip(excess) {
                *old = old.max(new);
            }
            self.covered = last + 1;
            // A block that used much of its share must not be followed by wider ones that use as much, and a width that
            // was just refused must not be tried again at once.
            let growth = if rise < allowed / 2.0 && self.rest == 0 { self.growth } else { 1.0 };
            self.width = self.width.max(least as f64) * growth;
            self.rest = self.rest.saturating_sub(1);
            return Ok(());
        }
    }
}

/// The block of all k whose distance from the worst k is from `first` to `last`.
fn block(others: u64, chances: Chances, cut: f64, first: u64, last: u64) -> Result<Pair, Error> {
    if first > last || last > others {
        return Err(internal("a block outside the crowd"));
    }
    if chances.symmetric() {
        Pair::new(first, others - last, chances, cut)
    } else {
        Pair::new(others - last, first, chances, cut)
    }
}

/// A curve, or for symmetric one-hot its maximum with its reversal `g F(1/g)`.
fn merged(excess: Vec<f64>, knots: &[f64], symmetric: bool) -> Vec<f64> {
    if !symmetric {
        return excess;
    }
    let reversed = excess.iter().rev().zip(knots).map(|(value, d)| (1.0 + d) * value);
    excess.iter().zip(reversed).map(|(value, other)| value.max(other)).collect()
}

/// The pair's log-ratios.
fn logs(pair: &Pair) -> Vec<f64> {
    (0..pair.counts()).map(|count| pair.ratio(count).ln_1p()).collect()
}

/// A pair's log-ratios, thinned if many, subdivided if few, their tails filled.
fn thinned(logs: &[f64], others: u64) -> Vec<f64> {
    let (Some(&first), Some(&last)) = (logs.first(), logs.last()) else { return vec![] };
    let inner = logs.get(1..logs.len() - 1).unwrap_or_default();
    let at = |position: f64| -> f64 {
        let below = position.floor() as usize;
        let share = position - below as f64;
        let get = |index: usize| inner.get(index).or(inner.last()).copied().unwrap_or(0.0);
        get(below) + share * (get(below + 1) - get(below))
    };
    let mut chosen: Vec<f64> = if inner.len() > KNOTS {
        let step = (inner.len() - 1) as f64 / (KNOTS - 1) as f64;
        (0..KNOTS).map(|index| at((index as f64 * step).round())).collect()
    } else {
        // Other compositions have their own kinks between these.
        let parts = (KNOTS as f64 / (1.25 * inner.len().max(1) as f64)).ceil() as usize;
        let pieces = inner.len().saturating_sub(1) * parts;
        (0..=pieces).map(|index| at(index as f64 / parts as f64)).collect()
    };
    let tail = if others <= 4096 { 4 * TAIL_KNOTS } else { TAIL_KNOTS };
    for (from, to) in [(first, at(0.0)), (at(inner.len() as f64), last)] {
        chosen.extend((0..tail).map(|index| from + (to - from) * index as f64 / (tail - 1) as f64));
    }
    chosen.extend([first, last]);
    chosen
}

/// Ratios less 1, in rising order, from log-ratios in any: 0 included, and for symmetric one-hot mirrored.
///
/// The first and the last lie just outside of all ratios, where the excess is 0: a rounding error there would be mass of
/// ratio 0. Of the others none is so close to them, or to the next, that rounding would move its curve (by `1e-9` of
/// its value at most).
fn knots_of(mut logs: Vec<f64>, symmetric: bool) -> Vec<f64> {
    if symmetric {
        logs.iter_mut().for_each(|log| *log = -log.abs());
    }
    logs.sort_by(f64::total_cmp);
    let first = logs.first().copied().unwrap_or(0.0);
    let last = if symmetric { -first } else { logs.last().copied().unwrap_or(0.0) };
    let span = last - first;
    // From 0 outwards.
    let side = |logs: &mut dyn Iterator<Item = f64>| {
        let mut kept = 0.0;
        let mut side = vec![];
        for log in logs {
            let inner = log - first > 1e-6 * span && last - log > 1e-6 * span;
            if inner && f64::abs(log - kept) > 1e-9 * span {
                kept = log;
                side.push(log.exp_m1());
            }
        }
        side
    };
    let (below, above) = logs.split_at(logs.partition_point(|&log| log < 0.0));
    let mut left = side(&mut below.iter().rev().copied());
    left.push(first.exp_m1() * (1.0 + 8.0 * U));
    let mut right = side(&mut above.iter().copied());
    if symmetric {
        // From the knots themselves, whose `1 + d` is exact or nearly so: `1/g - 1`.
        right = left.iter().map(|d| -d / (1.0 + d)).collect();
    } else {
        right.push(last.exp_m1() * (1.0 + 8.0 * U));
    }
    left.into_iter().rev().chain([0.0]).chain(right).collect()
}
