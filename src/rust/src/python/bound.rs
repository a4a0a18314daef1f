//! The certified bound.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::unlocked;
use crate::bound::exact::Setting;
use crate::bound::{Chances, renyi};

#[pyclass(frozen, module = "chorister._native", name = "Chances")]
pub(super) struct PyChances(Chances);

#[pymethods]
impl PyChances {
    #[new]
    #[pyo3(signature = (*, q, not_q, h, not_h, gap, replacement))]
    fn new(q: f64, not_q: f64, h: f64, not_h: f64, gap: f64, replacement: f64) -> PyResult<Self> {
        Ok(Self(Chances { q, not_q, h, not_h, gap, replacement }.checked()?))
    }
}

#[pyfunction]
#[pyo3(signature = (cohort, chances, *, noised, delta))]
pub(super) fn exact_epsilon(
    py: Python<'_>,
    cohort: u64,
    chances: &PyChances,
    noised: bool,
    delta: f64,
) -> PyResult<(f64, f64)> {
    let found = unlocked(py, || Setting::new(cohort, chances.0, noised)?.epsilon(delta))?;
    Ok((found.lower, found.upper))
}

#[pyfunction]
#[pyo3(signature = (cohort, chances, *, noised, epsilon))]
pub(super) fn exact_delta(
    py: Python<'_>,
    cohort: u64,
    chances: &PyChances,
    noised: bool,
    epsilon: f64,
) -> PyResult<(f64, f64)> {
    let found = unlocked(py, || Setting::new(cohort, chances.0, noised)?.delta(epsilon))?;
    Ok((found.lower, found.upper))
}

#[pyfunction]
#[pyo3(signature = (cohort, chances, *, noised, epsilon))]
pub(super) fn witness_delta(
    py: Python<'_>,
    cohort: u64,
    chances: &PyChances,
    noised: bool,
    epsilon: f64,
) -> PyResult<f64> {
    unlocked(py, || Setting::new(cohort, chances.0, noised)?.witness_delta(epsilon))
}

#[pyfunction]
#[pyo3(signature = (cohort, chances, *, held, instead, epsilon))]
pub(super) fn composition_delta(
    py: Python<'_>,
    cohort: u64,
    chances: &PyChances,
    held: u64,
    instead: u64,
    epsilon: f64,
) -> PyResult<f64> {
    unlocked(py, || {
        Setting::new(cohort, chances.0, false)?.composition_delta(held, instead, epsilon)
    })
}

#[pyfunction]
#[pyo3(signature = (cohort, chances, *, noised, delta))]
pub(super) fn exact_envelope<'py>(
    py: Python<'py>,
    cohort: u64,
    chances: &PyChances,
    noised: bool,
    delta: f64,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let envelope = unlocked(py, || Setting::new(cohort, chances.0, noised)?.envelope(delta))?;
    let bytes = |numbers: &[f64]| {
        PyBytes::new(py, &numbers.iter().copied().flat_map(f64::to_ne_bytes).collect::<Vec<u8>>())
    };
    Ok((bytes(&envelope.knots), bytes(&envelope.excess)))
}

#[pyfunction]
#[pyo3(signature = (cohort, chances, *, noised, order, witness=false))]
pub(super) fn renyi_divergence(
    py: Python<'_>,
    cohort: u64,
    chances: &PyChances,
    noised: bool,
    order: u32,
    witness: bool,
) -> PyResult<f64> {
    let compute = if witness { renyi::witness } else { renyi::divergence };
    unlocked(py, || compute(cohort, chances.0, order, noised))
}
