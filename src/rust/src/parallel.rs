//! Work on the items of a batch with several threads.
//!
//! Scoped threads rather than a pool: a pool's threads do not survive `fork`, and devices fork. Starting
//! a thread costs some ten microseconds, a job tens of milliseconds.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::error::Error;

/// Items that a thread takes at a time: few enough that all threads end together, enough to avoid contention.
const BLOCK: usize = 4;

/// More threads than this do not help.
const MAX_THREADS: usize = 256;

/// The number of threads to use: `threads`, or all cores if 0, but never more than there is work for.
fn effective(threads: usize, items: usize) -> usize {
    let wanted = match threads {
        0 => thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    wanted.min(MAX_THREADS).min(items.div_ceil(BLOCK)).max(1)
}

/// Applies `work` to 0..items. Each thread folds into its own accumulator, created by `start`.
///
/// Returns the results in order of their items, and the accumulators. A panic becomes an error.
pub fn fold<T, A, S, W>(
    threads: usize,
    items: usize,
    start: S,
    work: W,
) -> Result<(Vec<T>, Vec<A>), Error>
where
    T: Send,
    A: Send,
    S: Fn() -> A + Sync,
    W: Fn(usize, &mut A) -> T + Sync,
{
    let next = AtomicUsize::new(0);
    let run = || {
        let mut accumulator = start();
        let mut results = Vec::new();
        loop {
            let first = next.fetch_add(BLOCK, Ordering::Relaxed);
            if first >= items {
                return (results, accumulator);
            }
            for item in first..items.min(first + BLOCK) {
                results.push((item, work(item, &mut accumulator)));
            }
        }
    };

    let threads = effective(threads, items);
    let parts = if threads == 1 {
        vec![catch_unwind(AssertUnwindSafe(run))]
    } else {
        thread::scope(|scope| {
            // The calling thread works too; if the system refuses a thread, the others do its work.
            let handles: Vec<_> = (1..threads)
                .map_while(|_| thread::Builder::new().spawn_scoped(scope, run).ok())
                .collect();
            let own = catch_unwind(AssertUnwindSafe(run));
            let mut parts: Vec<_> = handles.into_iter().map(|handle| handle.join()).collect();
            parts.push(own);
            parts
        })
    };

    let mut slots: Vec<Option<T>> = (0..items).map(|_| None).collect();
    let mut accumulators = Vec::with_capacity(threads);
    for part in parts {
        let (results, accumulator) =
            part.map_err(|_| Error::Internal("a worker thread panicked".into()))?;
        for (item, result) in results {
            if let Some(slot) = slots.get_mut(item) {
                *slot = Some(result);
            }
        }
        accumulators.push(accumulator);
    }
    let results = slots
        .into_iter()
        .collect::<Option<Vec<T>>>()
        .ok_or_else(|| Error::Internal("an item of the batch was not worked on".into()))?;
    Ok((results, accumulators))
}

/// Like `fold`, without an accumulator.
pub fn map<T, W>(threads: usize, items: usize, work: W) -> Result<Vec<T>, Error>
where
    T: Send,
    W: Fn(usize) -> T + Sync,
{
    let (results, _) = fold(threads, items, || (), |item, ()| work(item))?;
    Ok(results)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_their_order_and_every_item_is_counted_once() {
        for threads in [0, 1, 2, 7] {
            for items in [0, 1, 3, 4, 5, 1000] {
                let (results, sums) = fold(
                    threads,
                    items,
                    || 0usize,
                    |i, sum| {
                        *sum += i;
                        i * i
                    },
                )
                .unwrap();
                assert_eq!(results, (0..items).map(|i| i * i).collect::<Vec<_>>());
                assert_eq!(sums.iter().sum::<usize>(), (0..items).sum::<usize>());
            }
        }
    }

    #[test]
    fn a_panic_becomes_an_error() {
        for threads in [1, 3] {
            let outcome = map(threads, 100, |i| if i == 57 { panic!("bug") } else { i });
            assert!(matches!(outcome, Err(Error::Internal(_))));
        }
    }
}
