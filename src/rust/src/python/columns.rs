//! The headers of a batch as columns of numbers, for checks that Python makes on all of them at once.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{native_bytes, unlocked};
use crate::wire::{Header, read_reports, read_verify_inits};

/// What the headers of a batch say, as columns.
#[pyclass(frozen, get_all, module = "chorister._native")]
pub(super) struct Headers {
    count: usize,
    ids: Py<PyBytes>,
    times: Py<PyBytes>,
    extensions: Py<PyBytes>,
    config_ids: Py<PyBytes>,
    ends: Py<PyBytes>,
}

impl Headers {
    fn new(py: Python<'_>, rows: &[(Header<'_>, u8, usize)]) -> Self {
        let bytes = |column: Vec<u8>| PyBytes::new(py, &column).unbind();
        Self {
            count: rows.len(),
            ids: bytes(rows.iter().flat_map(|(header, ..)| *header.id).collect()),
            times: native_bytes(py, rows.iter().map(|(header, ..)| header.time)).unbind(),
            extensions: bytes(
                rows.iter().map(|(header, ..)| u8::from(header.has_extensions)).collect(),
            ),
            config_ids: bytes(rows.iter().map(|(_, config_id, _)| *config_id).collect()),
            ends: native_bytes(py, rows.iter().map(|(_, _, end)| *end as u64)).unbind(),
        }
    }
}

#[pyfunction]
pub(super) fn scan_reports(py: Python<'_>, reports: &[u8]) -> PyResult<Headers> {
    let rows = unlocked(py, || {
        let reports = read_reports(reports)?;
        Ok(reports.iter().map(|r| (r.header, r.leader.config_id, r.end)).collect::<Vec<_>>())
    })?;
    Ok(Headers::new(py, &rows))
}

#[pyfunction]
pub(super) fn scan_verify_inits(py: Python<'_>, verify_inits: &[u8]) -> PyResult<Headers> {
    let rows = unlocked(py, || {
        let inits = read_verify_inits(verify_inits)?;
        Ok(inits.iter().map(|i| (i.header, i.ciphertext.config_id, i.end)).collect::<Vec<_>>())
    })?;
    Ok(Headers::new(py, &rows))
}
