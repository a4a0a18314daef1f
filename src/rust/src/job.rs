//! Whole batches: reports for a fleet, and one aggregation job at a time for leader and helper.
//!
//! A report that fails gets its error's code and is left out; it never fails the job. Verified output
//! shares are added up at once, so memory is bounded by the job's messages and the leader's states.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use sha2::{Digest, Sha256};

use crate::error::{Error, ReportError};
use crate::hpke::{HpkeConfig, HpkeKeypair};
use crate::parallel;
use crate::prio3::{Engine, State, Sum, VerifyKey};
use crate::wire::{
    Ciphertext, Header, ID_SIZE, Reader, put_opaque_u16, put_opaque_u32, put_verify_resp,
    read_reports, read_verify_inits, read_verify_resps,
};

/// What binds a report to its task. The draft's strings come from Python, which has all that is specific to a draft.
pub struct TaskBinding {
    pub engine: Arc<dyn Engine>,
    /// The VDAF's application context.
    pub context: Vec<u8>,
    /// The start of the associated data of input shares: task id and task configuration.
    pub aad: Vec<u8>,
    /// HPKE info of the leader's and the helper's input shares.
    pub leader_info: Vec<u8>,
    pub helper_info: Vec<u8>,
}

/// The sum of a job's verified reports at one aggregator.
pub struct Aggregated {
    pub share: Vec<u8>,
    pub count: u64,
    /// XOR of the SHA-256 hashes of the report ids that were added.
    pub checksum: [u8; 32],
    /// A code for every report of the job, in its order; 0 where the report was added.
    pub errors: Vec<u8>,
}

/// A job that waits for the helper's answer.
pub struct LeaderJob {
    engine: Arc<dyn Engine>,
    context: Vec<u8>,
    /// The body's `verify_inits`, for the reports that were not left out.
    pub verify_inits: Vec<u8>,
    /// A code for every report of the job, in its order; 0 where it was sent on.
    pub errors: Vec<u8>,
    waiting: Mutex<Vec<Waiting>>,
}

struct Waiting {
    /// The report's place in the job.
    place: usize,
    id: [u8; ID_SIZE],
    state: State,
}

/// An accumulator of one thread.
struct Partial {
    sum: Sum,
    count: u64,
    checksum: [u8; 32],
    fault: Option<Error>,
}

impl TaskBinding {
    /// Shards and seals one report per measurement. `values` holds the measurements one after the other.
    pub fn seal_reports(
        &self,
        values: &[u64],
        ids: &[u8],
        time: u64,
        leader: &HpkeConfig,
        helper: &HpkeConfig,
        threads: usize,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let (ids, rest) = ids.as_chunks::<ID_SIZE>();
        if !rest.is_empty() || (ids.is_empty() && !values.is_empty()) {
            return Err(Error::InvalidInput("report ids must be 16 bytes each".into()));
        }
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        if !values.len().is_multiple_of(ids.len()) {
            return Err(Error::InvalidInput(format!(
                "{} values are not {} measurements of one length",
                values.len(),
                ids.len()
            )));
        }
        let measurements: Vec<&[u64]> = values.chunks_exact(values.len() / ids.len()).collect();
        let jobs: Vec<(&[u64], &[u8; ID_SIZE])> = measurements.into_iter().zip(ids).collect();
        let sealed = parallel::map(threads, jobs.len(), |i| match jobs.get(i) {
            Some((measurement, id)) => self.seal_report(measurement, id, time, leader, helper),
            None => Err(Error::Internal("a measurement is missing".into())),
        })?;
        sealed.into_iter().collect()
    }

    fn seal_report(
        &self,
        measurement: &[u64],
        id: &[u8; ID_SIZE],
        time: u64,
        leader: &HpkeConfig,
        helper: &HpkeConfig,
    ) -> Result<Vec<u8>, Error> {
        let shares = self.engine.shard(&self.context, measurement, id)?;
        let mut report = Vec::with_capacity(shares.leader.len() + 512);
        Header::encode(&mut report, id, time, &shares.public);
        let aad = [self.aad.as_slice(), &report].concat();
        for (config, info, share) in [
            (leader, &self.leader_info, &shares.leader),
            (helper, &self.helper_info, &shares.helper),
        ] {
            let mut plaintext = Vec::with_capacity(share.len() + 6);
            put_opaque_u16(&mut plaintext, &[]);
            put_opaque_u32(&mut plaintext, share);
            config.seal(info, &aad, &plaintext, &mut report)?;
        }
        Ok(report)
    }

    /// Opens, decodes and begins to verify the leader's share of each report. Each piece has whole reports.
    pub fn leader_initialize(
        &self,
        verify_key: &VerifyKey,
        keys: &[&HpkeKeypair],
        pieces: &[&[u8]],
        rejected: Option<&[u8]>,
        threads: usize,
    ) -> Result<LeaderJob, Error> {
        let mut reports = Vec::new();
        for piece in pieces {
            reports.append(&mut read_reports(piece)?);
        }
        let rejected = Rejected::new(rejected, reports.len())?;
        let results = parallel::map(threads, reports.len(), |place| {
            let report = reports.get(place).ok_or(ReportError::InvalidMessage)?;
            rejected.check(place)?;
            let share = self.open(keys, &report.header, &report.leader, &self.leader_info)?;
            let (state, message) = shielded(|| {
                self.engine.leader_initialize(
                    verify_key,
                    &self.context,
                    report.header.id,
                    report.header.public_share,
                    share.payload(),
                )
            })?;
            let mut init = Vec::with_capacity(
                report.header.bytes.len() + report.helper.len() + message.len() + 4,
            );
            init.extend_from_slice(report.header.bytes);
            init.extend_from_slice(report.helper);
            put_opaque_u32(&mut init, &message);
            Ok((Waiting { place, id: *report.header.id, state }, init))
        })?;

        let mut job = LeaderJob {
            engine: Arc::clone(&self.engine),
            context: self.context.clone(),
            verify_inits: Vec::new(),
            errors: Vec::with_capacity(reports.len()),
            waiting: Mutex::default(),
        };
        let mut waiting = Vec::with_capacity(reports.len());
        for result in results {
            job.errors.push(code_of(&result));
            if let Ok((item, init)) = result {
                job.verify_inits.extend_from_slice(&init);
                waiting.push(item);
            }
        }
        job.waiting = Mutex::new(waiting);
        Ok(job)
    }

    /// Opens, decodes and verifies the helper's share of each report, and adds up what is valid.
    ///
    /// Returns the body's `verify_resps` too.
    pub fn helper_initialize(
        &self,
        verify_key: &VerifyKey,
        keys: &[&HpkeKeypair],
        verify_inits: &[u8],
        rejected: Option<&[u8]>,
        threads: usize,
    ) -> Result<(Vec<u8>, Aggregated), Error> {
        let inits = read_verify_inits(verify_inits)?;
        let rejected = Rejected::new(rejected, inits.len())?;
        let (results, partials) = parallel::fold(
            threads,
            inits.len(),
            || Partial::new(self.engine.as_ref()),
            |place, partial| {
                let init = inits.get(place).ok_or(ReportError::InvalidMessage)?;
                rejected.check(place)?;
                let share = self.open(keys, &init.header, &init.ciphertext, &self.helper_info)?;
                let (output, message) = shielded(|| {
                    self.engine.helper_initialize(
                        verify_key,
                        &self.context,
                        init.header.id,
                        init.header.public_share,
                        share.payload(),
                        init.message,
                    )
                })?;
                partial.add(self.engine.as_ref(), init.header.id, &output);
                Ok(message)
            },
        )?;

        let mut resps = Vec::new();
        let mut errors = Vec::with_capacity(inits.len());
        for (init, result) in inits.iter().zip(&results) {
            put_verify_resp(&mut resps, init.header.id, result);
            errors.push(code_of(result));
        }
        Ok((resps, aggregated(self.engine.as_ref(), partials, errors)?))
    }

    /// The plaintext of an input share, with every reason why there is none (section 4.6.3.3 and .4).
    fn open(
        &self,
        keys: &[&HpkeKeypair],
        header: &Header<'_>,
        ciphertext: &Ciphertext<'_>,
        info: &[u8],
    ) -> Result<InputShare, ReportError> {
        let key = keys
            .iter()
            .find(|key| key.config.id == ciphertext.config_id)
            .ok_or(ReportError::HpkeDecryptError)?;
        let aad = [self.aad.as_slice(), header.bytes].concat();
        let plaintext = shielded(|| {
            key.open(ciphertext, info, &aad).map_err(|_| ReportError::HpkeDecryptError)
        })?;
        if header.has_extensions {
            return Err(ReportError::InvalidMessage);
        }
        InputShare::decode(plaintext).ok_or(ReportError::InvalidMessage)
    }
}

impl LeaderJob {
    /// Finishes with the helper's `verify_resps`, and adds up what both found valid.
    ///
    /// An answer that does not fit the job (other reports, another order) is refused, and the job keeps waiting.
    pub fn finish(&self, verify_resps: &[u8], threads: usize) -> Result<Aggregated, Error> {
        let resps = read_verify_resps(verify_resps)?;
        let waiting = {
            let mut waiting = self
                .waiting
                .lock()
                .map_err(|_| Error::Internal("the job's lock is poisoned".into()))?;
            if waiting.is_empty() && !self.verify_inits.is_empty() {
                return Err(Error::InvalidInput("this job was finished before".into()));
            }
            if waiting.len() != resps.len()
                || waiting.iter().zip(&resps).any(|(item, resp)| item.id != *resp.id)
            {
                return Err(Error::Decode(
                    "verify_resps: not the job's reports in the job's order".into(),
                ));
            }
            std::mem::take(&mut *waiting)
        };

        // States are used up by verification: each is taken out of its slot exactly once.
        let places: Vec<usize> = waiting.iter().map(|item| item.place).collect();
        let slots: Vec<Mutex<Option<State>>> =
            waiting.into_iter().map(|item| Mutex::new(Some(item.state))).collect();
        let (results, partials) = parallel::fold(
            threads,
            slots.len(),
            || Partial::new(self.engine.as_ref()),
            |i, partial| {
                let (Some(slot), Some(resp)) = (slots.get(i), resps.get(i)) else {
                    return Err(ReportError::VdafVerifyError);
                };
                let state = slot.lock().ok().and_then(|mut slot| slot.take());
                let message = resp.outcome?;
                let state = state.ok_or(ReportError::VdafVerifyError)?;
                let output = shielded(|| self.engine.leader_finish(&self.context, state, message))?;
                partial.add(self.engine.as_ref(), resp.id, &output);
                Ok(())
            },
        )?;

        let mut errors = self.errors.clone();
        for (place, result) in places.iter().zip(&results) {
            if let Some(code) = errors.get_mut(*place) {
                *code = code_of(result);
            }
        }
        aggregated(self.engine.as_ref(), partials, errors)
    }
}

impl Partial {
    fn new(engine: &dyn Engine) -> Self {
        Self { sum: engine.empty_sum(), count: 0, checksum: [0; 32], fault: None }
    }

    fn add(&mut self, engine: &dyn Engine, id: &[u8; ID_SIZE], output: &crate::prio3::Output) {
        match engine.accumulate(&mut self.sum, output) {
            Ok(()) => {
                self.count += 1;
                xor(&mut self.checksum, &Sha256::digest(id));
            }
            // Not the report's fault: better to discard the whole job than to count it wrongly.
            Err(error) => self.fault = Some(error),
        }
    }
}

fn aggregated(
    engine: &dyn Engine,
    partials: Vec<Partial>,
    errors: Vec<u8>,
) -> Result<Aggregated, Error> {
    let mut total = Partial::new(engine);
    for partial in partials {
        if let Some(fault) = partial.fault {
            return Err(fault);
        }
        engine.merge(&mut total.sum, &partial.sum)?;
        total.count += partial.count;
        xor(&mut total.checksum, &partial.checksum);
    }
    Ok(Aggregated {
        share: engine.encode_sum(&total.sum)?,
        count: total.count,
        checksum: total.checksum,
        errors,
    })
}

fn xor(into: &mut [u8; 32], other: &[u8]) {
    for (a, b) in into.iter_mut().zip(other) {
        *a ^= b;
    }
}

fn code_of<T>(result: &Result<T, ReportError>) -> u8 {
    result.as_ref().err().map_or(0, |error| error.code())
}

/// A panic of a crate below on one report's bytes is that report's error, never the job's.
fn shielded<T>(work: impl FnOnce() -> Result<T, ReportError>) -> Result<T, ReportError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(ReportError::VdafVerifyError))
}

/// `PlaintextInputShare` without extensions.
struct InputShare {
    plaintext: zeroize::Zeroizing<Vec<u8>>,
    payload: std::ops::Range<usize>,
}

impl InputShare {
    fn decode(plaintext: Vec<u8>) -> Option<Self> {
        let plaintext = zeroize::Zeroizing::new(plaintext);
        let mut reader = Reader::new(&plaintext, "PlaintextInputShare");
        let extensions = reader.opaque_u16().ok()?;
        let payload = reader.opaque_u32().ok()?.len();
        reader.finish().ok()?;
        if !extensions.is_empty() || payload == 0 {
            return None;
        }
        let end = plaintext.len();
        Some(Self { plaintext, payload: end - payload..end })
    }

    fn payload(&self) -> &[u8] {
        self.plaintext.get(self.payload.clone()).unwrap_or_default()
    }
}

/// Reports that the caller already left out: replays, reports outside the window.
struct Rejected<'a>(Option<&'a [u8]>);

impl<'a> Rejected<'a> {
    fn new(codes: Option<&'a [u8]>, reports: usize) -> Result<Self, Error> {
        if let Some(codes) = codes {
            if codes.len() != reports {
                return Err(Error::InvalidInput(format!(
                    "rejected has {} codes for {reports} reports",
                    codes.len()
                )));
            }
            if codes.iter().any(|code| *code != 0 && ReportError::from_code(*code).is_none()) {
                return Err(Error::InvalidInput(
                    "rejected has a code that is not a report error of the draft".into(),
                ));
            }
        }
        Ok(Self(codes))
    }

    fn check(&self, place: usize) -> Result<(), ReportError> {
        let code = self.0.and_then(|codes| codes.get(place)).copied().unwrap_or(0);
        ReportError::from_code(code).map_or(Ok(()), Err)
    }
}
