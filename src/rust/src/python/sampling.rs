//! Random bits and binomial draws.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{native_bytes, unlocked, values};
use crate::error::Error;
use crate::parallel;
use crate::sampling::{self, OneHotLaw, SystemWords, binomials};

/// Bits that one call draws at most, a byte each: an allocation that fails would end the process.
const MAX_BITS: usize = 1 << 30;

#[pyfunction]
#[pyo3(signature = (indices, length, *, q_threshold, h_threshold, max_weight, threads=0))]
pub(super) fn randomize_one_hot<'py>(
    py: Python<'py>,
    indices: &Bound<'py, PyAny>,
    length: usize,
    q_threshold: u64,
    h_threshold: u64,
    max_weight: usize,
    threads: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let indices = values(py, indices)?;
    let bits = unlocked(py, || {
        let law = OneHotLaw { length, q_threshold, h_threshold, max_weight };
        law.check()?;
        if indices.len().saturating_mul(length) > MAX_BITS {
            return Err(Error::InvalidInput(format!(
                "{} reports of length {length} at once are too many: ask for at most {} at a time",
                indices.len(),
                MAX_BITS / length
            )));
        }
        let (reports, _) = parallel::fold(threads, indices.len(), SystemWords::new, |i, words| {
            let index = indices.get(i).and_then(|index| usize::try_from(*index).ok());
            let mut bits = Vec::with_capacity(length);
            law.draw(index.unwrap_or(usize::MAX), words, &mut bits).map(|()| bits)
        })?;
        Ok(reports.into_iter().collect::<Result<Vec<_>, _>>()?.concat())
    })?;
    Ok(PyBytes::new(py, &bits))
}

/// Numbers that one call orders at most.
const MAX_ORDERED: usize = 1 << 26;

#[pyfunction]
pub(super) fn random_order<'py>(
    py: Python<'py>,
    first: i64,
    count: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let order = unlocked(py, || {
        let end = i64::try_from(count).ok().and_then(|count| first.checked_add(count));
        if count > MAX_ORDERED || end.is_none() {
            return Err(Error::InvalidInput(format!(
                "at most {MAX_ORDERED} numbers below 2^63, got {count} from {first}"
            )));
        }
        sampling::random_order(first, count)
    })?;
    Ok(native_bytes(py, order.into_iter().map(i64::cast_unsigned)))
}

#[pyfunction]
#[pyo3(signature = (count, trials, *, threshold, threads=0))]
pub(super) fn sample_binomials<'py>(
    py: Python<'py>,
    count: usize,
    trials: u64,
    threshold: u64,
    threads: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let draws = unlocked(py, || {
        if count > crate::prio3::MAX_ELEMENTS || trials > u64::from(u32::MAX) {
            return Err(Error::InvalidInput(format!(
                "at most {} draws of at most {} trials, got {count} of {trials}",
                crate::prio3::MAX_ELEMENTS,
                u32::MAX
            )));
        }
        binomials(count, trials, threshold, threads)
    })?;
    Ok(native_bytes(py, draws.into_iter()))
}
