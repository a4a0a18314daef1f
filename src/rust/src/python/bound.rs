//! The certified bound.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::unlocked;
use crate::bound::exact::Setting;
use crate::bound::renyi;

#[pyfunction]
#[pyo3(signature = (cohort, *, symmetric, local_epsilon, noised, delta))]
pub(super) fn exact_epsilon(
    py: Python<'_>,
    cohort: u64,
    symmetric: bool,
    local_epsilon: f64,
    noised: bool,
    delta: f64,
) -> PyResult<(f64, f64)> {
    let found =
        unlocked(py, || Setting::new(cohort, symmetric, local_epsilon, noised)?.epsilon(delta))?;
    Ok((found.lower, found.upper))
}

#[pyfunction]
#[pyo3(signature = (cohort, *, symmetric, local_epsilon, noised, epsilon))]
pub(super) fn exact_delta(
    py: Python<'_>,
    cohort: u64,
    symmetric: bool,
    local_epsilon: f64,
    noised: bool,
    epsilon: f64,
) -> PyResult<(f64, f64)> {
    let found =
        unlocked(py, || Setting::new(cohort, symmetric, local_epsilon, noised)?.delta(epsilon))?;
    Ok((found.lower, found.upper))
}

#[pyfunction]
#[pyo3(signature = (cohort, *, symmetric, local_epsilon, noised, epsilon))]
pub(super) fn witness_delta(
    py: Python<'_>,
    cohort: u64,
    symmetric: bool,
    local_epsilon: f64,
    noised: bool,
    epsilon: f64,
) -> PyResult<f64> {
    unlocked(py, || Setting::new(cohort, symmetric, local_epsilon, noised)?.witness_delta(epsilon))
}

#[pyfunction]
#[pyo3(signature = (cohort, *, symmetric, local_epsilon, held, instead, epsilon))]
pub(super) fn composition_delta(
    py: Python<'_>,
    cohort: u64,
    symmetric: bool,
    local_epsilon: f64,
    held: u64,
    instead: u64,
    epsilon: f64,
) -> PyResult<f64> {
    unlocked(py, || {
        Setting::new(cohort, symmetric, local_epsilon, false)?
            .composition_delta(held, instead, epsilon)
    })
}

#[pyfunction]
#[pyo3(signature = (cohort, *, symmetric, local_epsilon, noised, delta))]
pub(super) fn exact_envelope<'py>(
    py: Python<'py>,
    cohort: u64,
    symmetric: bool,
    local_epsilon: f64,
    noised: bool,
    delta: f64,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let envelope =
        unlocked(py, || Setting::new(cohort, symmetric, local_epsilon, noised)?.envelope(delta))?;
    let bytes = |numbers: &[f64]| {
        PyBytes::new(py, &numbers.iter().copied().flat_map(f64::to_ne_bytes).collect::<Vec<u8>>())
    };
    Ok((bytes(&envelope.knots), bytes(&envelope.excess)))
}

#[pyfunction]
#[pyo3(signature = (cohort, *, symmetric, local_epsilon, noised, order, witness=false))]
pub(super) fn renyi_divergence(
    py: Python<'_>,
    cohort: u64,
    symmetric: bool,
    local_epsilon: f64,
    noised: bool,
    order: u32,
    witness: bool,
) -> PyResult<f64> {
    let compute = if witness { renyi::witness } else { renyi::divergence };
    unlocked(py, || compute(cohort, symmetric, local_epsilon, order, noised))
}
