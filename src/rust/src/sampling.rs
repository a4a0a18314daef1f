//! Random bits with exact probabilities, from the operating system's generator.
//!
//! A probability is an integer threshold t and stands for t / 2^64: a uniform 64-bit number below t is
//! a one. The comparison is done for 64 numbers at once, bit plane by bit plane from the most significant
//! one, until all 64 are decided (about 7 planes): exact, and about ten times faster than one by one. The
//! number of planes depends on fresh random bits only, never on the data.

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use zeroize::Zeroize;

use crate::error::Error;
use crate::parallel;

/// Redraws before a weight bound is called impossible. The bounds in use fail with chance 2^-80 per draw.
const MAX_DRAWS: usize = 1000;

/// Where uniform 64-bit words come from.
pub trait Words {
    fn word(&mut self) -> Result<u64, Error>;
}

/// Words straight from the operating system, fetched a buffer at a time.
pub struct SystemWords {
    buffer: [u8; 1024],
    used: usize,
}

impl SystemWords {
    pub fn new() -> Self {
        Self { buffer: [0; 1024], used: 1024 }
    }
}

impl Default for SystemWords {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for SystemWords {
    fn drop(&mut self) {
        self.buffer.zeroize();
    }
}

impl Words for SystemWords {
    fn word(&mut self) -> Result<u64, Error> {
        let refill = |buffer: &mut [u8]| {
            getrandom::fill(buffer).map_err(|error| {
                Error::Internal(format!("the system's random generator failed: {error}"))
            })
        };
        if self.used >= self.buffer.len() {
            refill(&mut self.buffer)?;
            self.used = 0;
        }
        let bytes = self
            .buffer
            .get(self.used..self.used + 8)
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(|| Error::Internal("random buffer out of step".into()))?;
        self.used += 8;
        Ok(u64::from_ne_bytes(bytes))
    }
}

/// Words of ChaCha20 with a key from the operating system, for millions of draws.
pub struct ChaChaWords(ChaCha20Rng);

impl ChaChaWords {
    pub fn from_system() -> Result<Self, Error> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|error| {
            Error::Internal(format!("the system's random generator failed: {error}"))
        })?;
        let words = Self(ChaCha20Rng::from_seed(seed));
        seed.zeroize();
        Ok(words)
    }
}

impl Words for ChaChaWords {
    fn word(&mut self) -> Result<u64, Error> {
        Ok(self.0.next_u64())
    }
}

/// 64 independent bits, each one with probability threshold / 2^64.
fn bernoulli_word(threshold: u64, words: &mut impl Words) -> Result<u64, Error> {
    let mut below = 0u64;
    let mut undecided = u64::MAX;
    for plane in (0..64).rev() {
        let random = words.word()?;
        if threshold >> plane & 1 == 1 {
            below |= undecided & !random;
            undecided &= random;
        } else {
            undecided &= !random;
        }
        if undecided == 0 {
            break;
        }
    }
    // What is still undecided equals the threshold, and is thus not below it.
    Ok(below)
}

/// The numbers first..first + count in an order drawn by the operating system.
///
/// Each gets 64 random bits to sort by. Among a million, two are equal with probability 3e-8, and then stay
/// in order.
pub fn random_order(first: i64, count: usize) -> Result<Vec<i64>, Error> {
    let mut words = SystemWords::new();
    let mut drawn = (first..)
        .take(count)
        .map(|number| words.word().map(|key| (key, number)))
        .collect::<Result<Vec<_>, _>>()?;
    drawn.sort_unstable();
    Ok(drawn.into_iter().map(|(_, number)| number).collect())
}

/// The law of one report: its own bit is one with probability h, the others with probability q.
#[derive(Clone, Copy, Debug)]
pub struct OneHotLaw {
    pub length: usize,
    pub q_threshold: u64,
    pub h_threshold: u64,
    pub max_weight: usize,
}

impl OneHotLaw {
    pub fn check(&self) -> Result<(), Error> {
        if self.length == 0 || self.length > crate::prio3::MAX_ELEMENTS {
            return Err(Error::InvalidInput(format!(
                "length must be 1 to {}, got {}",
                crate::prio3::MAX_ELEMENTS,
                self.length
            )));
        }
        if self.max_weight == 0 || self.max_weight > self.length {
            return Err(Error::InvalidInput(format!(
                "max_weight must be 1 to the length {}, got {}",
                self.length, self.max_weight
            )));
        }
        if self.q_threshold == 0 || self.q_threshold > self.h_threshold {
            return Err(Error::InvalidInput(
                "thresholds must satisfy 0 < q <= h: a bit that is never set, or set more often \
                 for others than for its owner, protects nobody"
                    .into(),
            ));
        }
        Ok(())
    }

    /// Appends one report for `index`, one byte (0 or 1) per coordinate, redrawn while it has too many ones.
    pub fn draw(
        &self,
        index: usize,
        words: &mut impl Words,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if index >= self.length {
            return Err(Error::InvalidInput(format!(
                "index must be 0 to {}, got {index}",
                self.length - 1
            )));
        }
        let start = out.len();
        for _ in 0..MAX_DRAWS {
            let mut left = self.length;
            while left > 0 {
                let bits = bernoulli_word(self.q_threshold, words)?;
                let lanes = left.min(64);
                out.extend((0..lanes).map(|lane| (bits >> lane & 1) as u8));
                left -= lanes;
            }
            let own = u8::from(words.word()? < self.h_threshold);
            if let Some(bit) = out.get_mut(start + index) {
                *bit = own;
            }
            let weight: usize = out.iter().skip(start).map(|bit| usize::from(*bit)).sum();
            if weight <= self.max_weight {
                return Ok(());
            }
            out.truncate(start);
        }
        Err(Error::InvalidInput(format!(
            "no report of weight at most {} came up in {MAX_DRAWS} draws: max_weight is too small \
             for this length and epsilon",
            self.max_weight
        )))
    }
}

/// One binomial draw: the number of ones among `trials` bits with probability threshold / 2^64.
pub fn binomial(trials: u64, threshold: u64, words: &mut impl Words) -> Result<u64, Error> {
    let mut ones = 0;
    for _ in 0..trials / 64 {
        ones += u64::from(bernoulli_word(threshold, words)?.count_ones());
    }
    let rest = trials % 64;
    if rest > 0 {
        let lanes = (1u64 << rest) - 1;
        ones += u64::from((bernoulli_word(threshold, words)? & lanes).count_ones());
    }
    Ok(ones)
}

/// `count` independent binomial draws.
pub fn binomials(
    count: usize,
    trials: u64,
    threshold: u64,
    threads: usize,
) -> Result<Vec<u64>, Error> {
    let (draws, _) = parallel::fold(
        threads,
        count,
        || None,
        |_, words: &mut Option<ChaChaWords>| {
            if words.is_none() {
                *words = Some(ChaChaWords::from_system()?);
            }
            match words {
                Some(words) => binomial(trials, threshold, words),
                None => Err(Error::Internal("no generator".into())),
            }
        },
    )?;
    draws.into_iter().collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    /// Words from a list, to see which words make which bits.
    struct Listed(Vec<u64>);

    impl Words for Listed {
        fn word(&mut self) -> Result<u64, Error> {
            Ok(self.0.remove(0))
        }
    }

    #[test]
    fn lanes_compare_as_whole_numbers_do() {
        // Every lane's number, plane by plane, against the plain comparison of 64-bit integers.
        let numbers: Vec<u64> = (0..64u64)
            .map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(i as u32))
            .collect();
        let planes: Vec<u64> = (0..64)
            .rev()
            .map(|plane| (0..64).fold(0, |word, lane| word | (numbers[lane] >> plane & 1) << lane))
            .collect();
        let mut thresholds = numbers.clone();
        thresholds.extend([0, 1, 1 << 63, u64::MAX]);
        for threshold in thresholds {
            let bits = bernoulli_word(threshold, &mut Listed(planes.clone())).unwrap();
            for (lane, number) in numbers.iter().enumerate() {
                assert_eq!(bits >> lane & 1 == 1, *number < threshold);
            }
        }
    }

    #[test]
    fn impossible_weight_bounds_are_refused() {
        let law =
            OneHotLaw { length: 1000, q_threshold: 1 << 63, h_threshold: 1 << 63, max_weight: 1 };
        let outcome = law.draw(0, &mut SystemWords::new(), &mut Vec::new());
        assert!(matches!(outcome, Err(Error::InvalidInput(_))));
    }
}
