//! The interface to Python: converts arguments, releases the GIL, and turns errors into exceptions.
//!
//! Messages come as `bytes`, which nobody can change while the GIL is released; arrays are copied first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyTuple};

use crate::error::{Error, ReportError};
use crate::hpke::{HpkeConfig, HpkeKeypair};
use crate::job;
use crate::prio3::{Engine, Kind, VerifyKey};
use crate::wire::{Ciphertext, Reader};

mod bound;
mod columns;
mod sampling;

mod raised {
    pyo3::import_exception!(chorister.errors, DecodeError);
    pyo3::import_exception!(chorister.errors, HPKEError);
    pyo3::import_exception!(chorister.errors, InternalError);
    pyo3::import_exception!(chorister.errors, InvalidInput);
    pyo3::import_exception!(chorister.errors, UnsupportedSuite);
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::InvalidInput(_) => raised::InvalidInput::new_err(message),
            Error::Decode(_) => raised::DecodeError::new_err(message),
            Error::Hpke(_) => raised::HPKEError::new_err(message),
            Error::UnsupportedSuite(_) => raised::UnsupportedSuite::new_err(message),
            Error::Internal(_) => raised::InternalError::new_err(message),
        }
    }
}

/// Runs `work` without the GIL; a panic becomes an `InternalError`, never a crash.
fn unlocked<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    py.detach(|| {
        catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|_| Err(Error::Internal("a panic".into())))
    })
    .map_err(PyErr::from)
}

/// Unsigned numbers from any buffer of uint8 or uint64, copied.
fn values(py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(buffer) = PyBuffer::<u8>::get(array) {
        return Ok(buffer.to_vec(py)?.into_iter().map(u64::from).collect());
    }
    if let Ok(buffer) = PyBuffer::<u64>::get(array) {
        return buffer.to_vec(py);
    }
    Err(Error::InvalidInput("an array of uint8 or uint64, or bytes, is needed".into()).into())
}

fn exactly<const N: usize>(name: &str, bytes: &[u8]) -> Result<[u8; N], Error> {
    bytes.try_into().map_err(|_| {
        Error::InvalidInput(format!("{name} must have {N} bytes, got {}", bytes.len()))
    })
}

fn native_bytes<'py>(py: Python<'py>, numbers: impl Iterator<Item = u64>) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &numbers.flat_map(u64::to_ne_bytes).collect::<Vec<u8>>())
}

#[pyclass(frozen, module = "chorister._native")]
struct Prio3 {
    engine: Arc<dyn Engine>,
    kind: Kind,
    #[pyo3(get)]
    chunk_length: usize,
}

impl Prio3 {
    fn build(kind: Kind, chunk_length: Option<usize>) -> Result<Self, Error> {
        let (engine, chunk_length) = kind.engine(chunk_length)?;
        Ok(Self { engine: Arc::from(engine), kind, chunk_length })
    }
}

#[pymethods]
impl Prio3 {
    #[staticmethod]
    fn count() -> PyResult<Self> {
        Ok(Self::build(Kind::Count, None)?)
    }

    #[staticmethod]
    fn sum(max_measurement: u64) -> PyResult<Self> {
        Ok(Self::build(Kind::Sum { max_measurement }, None)?)
    }

    #[staticmethod]
    #[pyo3(signature = (length, max_measurement, *, chunk_length=None))]
    fn sum_vec(length: usize, max_measurement: u64, chunk_length: Option<usize>) -> PyResult<Self> {
        Ok(Self::build(Kind::SumVec { length, max_measurement }, chunk_length)?)
    }

    #[staticmethod]
    #[pyo3(signature = (length, *, chunk_length=None))]
    fn histogram(length: usize, chunk_length: Option<usize>) -> PyResult<Self> {
        Ok(Self::build(Kind::Histogram { length }, chunk_length)?)
    }

    #[staticmethod]
    #[pyo3(signature = (length, max_weight, *, chunk_length=None))]
    fn multihot_count_vec(
        length: usize,
        max_weight: usize,
        chunk_length: Option<usize>,
    ) -> PyResult<Self> {
        Ok(Self::build(Kind::MultihotCountVec { length, max_weight }, chunk_length)?)
    }

    fn __repr__(&self) -> String {
        format!("Prio3({:?}, chunk_length={})", self.kind, self.chunk_length)
    }

    #[getter]
    fn algorithm_id(&self) -> u32 {
        self.engine.algorithm_id()
    }

    #[getter]
    fn length(&self) -> usize {
        self.engine.output_len()
    }

    fn shard<'py>(
        &self,
        py: Python<'py>,
        ctx: &[u8],
        measurement: &Bound<'py, PyAny>,
        nonce: &[u8],
    ) -> PyResult<Bound<'py, PyTuple>> {
        let nonce = exactly("nonce", nonce)?;
        let measurement = values(py, measurement)?;
        let shares = unlocked(py, || self.engine.shard(ctx, &measurement, &nonce))?;
        PyTuple::new(
            py,
            [&shares.public, &shares.leader, &shares.helper].map(|share| PyBytes::new(py, share)),
        )
    }

    fn zero<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let share = unlocked(py, || self.engine.encode_sum(&self.engine.empty_sum()))?;
        Ok(PyBytes::new(py, &share))
    }

    fn merge<'py>(
        &self,
        py: Python<'py>,
        shares: Vec<Bound<'py, PyBytes>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let shares: Vec<&[u8]> = shares.iter().map(|share| share.as_bytes()).collect();
        let merged = unlocked(py, || {
            let mut total = self.engine.empty_sum();
            for share in shares {
                self.engine.merge(&mut total, &self.engine.decode_sum(share)?)?;
            }
            self.engine.encode_sum(&total)
        })?;
        Ok(PyBytes::new(py, &merged))
    }

    fn add_counts<'py>(
        &self,
        py: Python<'py>,
        share: &[u8],
        counts: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let counts = values(py, counts)?;
        let noised = unlocked(py, || {
            let mut sum = self.engine.decode_sum(share)?;
            self.engine.add_counts(&mut sum, &counts)?;
            self.engine.encode_sum(&sum)
        })?;
        Ok(PyBytes::new(py, &noised))
    }

    #[pyo3(signature = (leader_share, helper_share, *, count, noise_trials=0))]
    fn unshard<'py>(
        &self,
        py: Python<'py>,
        leader_share: &[u8],
        helper_share: &[u8],
        count: usize,
        noise_trials: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let entries = unlocked(py, || {
            let sums =
                vec![self.engine.decode_sum(leader_share)?, self.engine.decode_sum(helper_share)?];
            let entries = self.engine.unshard(sums, count)?;
            let most =
                count as u128 * u128::from(self.kind.max_entry()) + 2 * u128::from(noise_trials);
            entries
                .into_iter()
                .map(|entry| u64::try_from(entry).ok().filter(|_| entry <= most))
                .collect::<Option<Vec<u64>>>()
                .ok_or_else(|| {
                    Error::Decode(format!(
                        "the aggregate shares do not belong together: an entry exceeds {most}, \
                         the most that {count} reports can add"
                    ))
                })
        })?;
        Ok(native_bytes(py, entries.into_iter()))
    }
}

#[pyclass(frozen, name = "HPKEKeypair", module = "chorister._native")]
struct PyKeypair(HpkeKeypair);

#[pymethods]
impl PyKeypair {
    #[staticmethod]
    fn generate(config_id: u8) -> PyResult<Self> {
        Ok(Self(HpkeKeypair::generate(config_id)?))
    }

    #[staticmethod]
    fn from_bytes(config_id: u8, public_key: &[u8], private_key: &[u8]) -> PyResult<Self> {
        Ok(Self(HpkeKeypair::from_parts(config_id, public_key, private_key)?))
    }

    fn __repr__(&self) -> String {
        format!("HPKEKeypair(config_id={})", self.0.config.id)
    }

    #[getter]
    fn config_id(&self) -> u8 {
        self.0.config.id
    }

    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.config.encode())
    }

    #[getter]
    fn public_key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.public_key())
    }

    fn private_key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.private_key())
    }

    fn open<'py>(
        &self,
        py: Python<'py>,
        ciphertext: &[u8],
        info: &[u8],
        aad: &[u8],
    ) -> PyResult<Bound<'py, PyBytes>> {
        let plaintext = unlocked(py, || {
            let mut reader = Reader::new(ciphertext, "HpkeCiphertext");
            let ciphertext = Ciphertext::read(&mut reader)?;
            reader.finish()?;
            if ciphertext.config_id != self.0.config.id {
                return Err(Error::Hpke(format!(
                    "sealed to configuration {}, this key pair is {}",
                    ciphertext.config_id, self.0.config.id
                )));
            }
            self.0.open(&ciphertext, info, aad)
        })?;
        Ok(PyBytes::new(py, &plaintext))
    }
}

/// Messages in one piece or, as they come from a database, in several: joining them would copy a whole job.
#[derive(FromPyObject)]
enum Pieces<'py> {
    One(Bound<'py, PyBytes>),
    Many(Vec<Bound<'py, PyBytes>>),
}

#[pyclass(frozen, module = "chorister._native")]
struct TaskBinding(job::TaskBinding);

#[pymethods]
impl TaskBinding {
    #[new]
    #[pyo3(signature = (vdaf, *, context, aad, leader_info, helper_info))]
    fn new(
        vdaf: &Prio3,
        context: Vec<u8>,
        aad: Vec<u8>,
        leader_info: Vec<u8>,
        helper_info: Vec<u8>,
    ) -> Self {
        Self(job::TaskBinding {
            engine: Arc::clone(&vdaf.engine),
            context,
            aad,
            leader_info,
            helper_info,
        })
    }

    #[pyo3(signature = (measurements, *, report_ids, time, leader_config, helper_config, threads=0))]
    #[allow(clippy::too_many_arguments)] // keyword-only in Python
    fn seal_reports<'py>(
        &self,
        py: Python<'py>,
        measurements: &Bound<'py, PyAny>,
        report_ids: &[u8],
        time: u64,
        leader_config: &[u8],
        helper_config: &[u8],
        threads: usize,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let measurements = values(py, measurements)?;
        let (leader, helper) =
            (HpkeConfig::decode(leader_config)?, HpkeConfig::decode(helper_config)?);
        let reports = unlocked(py, || {
            self.0.seal_reports(&measurements, report_ids, time, &leader, &helper, threads)
        })?;
        Ok(reports.iter().map(|report| PyBytes::new(py, report)).collect())
    }

    #[pyo3(signature = (verify_key, keys, reports, *, rejected=None, threads=0))]
    fn leader_initialize(
        &self,
        py: Python<'_>,
        verify_key: &[u8],
        keys: Vec<PyRef<'_, PyKeypair>>,
        reports: Pieces<'_>,
        rejected: Option<&[u8]>,
        threads: usize,
    ) -> PyResult<LeaderJob> {
        let verify_key: VerifyKey = exactly("verify_key", verify_key)?;
        let keys: Vec<&HpkeKeypair> = keys.iter().map(|key| &key.0).collect();
        let pieces = match &reports {
            Pieces::One(bytes) => vec![bytes.as_bytes()],
            Pieces::Many(pieces) => pieces.iter().map(|piece| piece.as_bytes()).collect(),
        };
        let job = unlocked(py, || {
            self.0.leader_initialize(&verify_key, &keys, &pieces, rejected, threads)
        })?;
        Ok(LeaderJob(job))
    }

    #[pyo3(signature = (verify_key, keys, verify_inits, *, rejected=None, threads=0))]
    fn helper_initialize<'py>(
        &self,
        py: Python<'py>,
        verify_key: &[u8],
        keys: Vec<PyRef<'py, PyKeypair>>,
        verify_inits: &[u8],
        rejected: Option<&[u8]>,
        threads: usize,
    ) -> PyResult<(Bound<'py, PyBytes>, Aggregated)> {
        let verify_key: VerifyKey = exactly("verify_key", verify_key)?;
        let keys: Vec<&HpkeKeypair> = keys.iter().map(|key| &key.0).collect();
        let (resps, aggregated) = unlocked(py, || {
            self.0.helper_initialize(&verify_key, &keys, verify_inits, rejected, threads)
        })?;
        Ok((PyBytes::new(py, &resps), Aggregated(aggregated)))
    }
}

#[pyclass(frozen, module = "chorister._native")]
struct LeaderJob(job::LeaderJob);

#[pymethods]
impl LeaderJob {
    #[getter]
    fn verify_inits<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.verify_inits)
    }

    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.errors)
    }

    #[pyo3(signature = (verify_resps, *, threads=0))]
    fn finish(&self, py: Python<'_>, verify_resps: &[u8], threads: usize) -> PyResult<Aggregated> {
        Ok(Aggregated(unlocked(py, || self.0.finish(verify_resps, threads))?))
    }
}

#[pyclass(frozen, module = "chorister._native")]
struct Aggregated(job::Aggregated);

#[pymethods]
impl Aggregated {
    #[getter]
    fn share<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.share)
    }

    #[getter]
    fn count(&self) -> u64 {
        self.0.count
    }

    #[getter]
    fn checksum<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.checksum)
    }

    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.errors)
    }

    fn __repr__(&self) -> String {
        format!("Aggregated(count={}, reports={})", self.0.count, self.0.errors.len())
    }
}

#[pyfunction]
fn hpke_seal<'py>(
    py: Python<'py>,
    config: &[u8],
    info: &[u8],
    aad: &[u8],
    plaintext: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    let ciphertext = unlocked(py, || {
        let mut ciphertext = Vec::with_capacity(plaintext.len() + 64);
        HpkeConfig::decode(config)?.seal(info, aad, plaintext, &mut ciphertext)?;
        Ok(ciphertext)
    })?;
    Ok(PyBytes::new(py, &ciphertext))
}

/// The draft's codes as an `enum.IntEnum`, so that Python does not repeat them.
fn report_error_enum<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    let members: Vec<(&str, u8)> =
        ReportError::NAMED.iter().map(|(name, error)| (*name, error.code())).collect();
    let place = [("module", module.name()?)].into_py_dict(py)?;
    py.import("enum")?.getattr("IntEnum")?.call(("ReportError", members), Some(&place))
}

#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("ReportError", super::report_error_enum(module)?)
    }

    #[pymodule_export]
    use super::bound::{
        PyChances, composition_delta, exact_delta, exact_envelope, exact_epsilon, renyi_divergence,
        witness_delta,
    };
    #[pymodule_export]
    use super::columns::{Headers, scan_reports, scan_verify_inits};
    #[pymodule_export]
    use super::sampling::{random_order, randomize_one_hot, sample_binomials};
    #[pymodule_export]
    use super::{Aggregated, LeaderJob, Prio3, PyKeypair, TaskBinding, hpke_seal};
}
