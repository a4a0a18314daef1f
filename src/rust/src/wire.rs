//! The DAP messages that exist once per report: read without copying, written without a Python object.
//!
//! draft-ietf-ppm-dap-18, sections 4.5.2 (`Report`) and 4.6.3 (`VerifyInit`, `VerifyResp`). Messages that
//! exist once per request are Python's.

use std::collections::HashSet;

use crate::error::{Error, ReportError};

pub const ID_SIZE: usize = 16;

/// Reads the TLS presentation language's types off a byte string; every read says where it failed.
pub struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
    what: &'static str,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { bytes, position: 0, what }
    }

    pub fn is_empty(&self) -> bool {
        self.position == self.bytes.len()
    }

    pub fn position(&self) -> usize {
        self.position
    }

    /// What was read since `start`.
    pub fn since(&self, start: usize) -> &'a [u8] {
        self.bytes.get(start..self.position).unwrap_or_default()
    }

    pub fn take(&mut self, length: usize) -> Result<&'a [u8], Error> {
        let end = self.position.checked_add(length);
        match end.and_then(|end| self.bytes.get(self.position..end)) {
            Some(taken) => {
                self.position += length;
                Ok(taken)
            }
            None => Err(Error::Decode(format!(
                "{} ends early: {length} bytes wanted at byte {} of {}",
                self.what,
                self.position,
                self.bytes.len()
            ))),
        }
    }

    pub fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], Error> {
        self.take(N)?.try_into().map_err(|_| Error::Internal("a slice of another length".into()))
    }

    pub fn u8(&mut self) -> Result<u8, Error> {
        Ok(u8::from_be_bytes(*self.array()?))
    }

    pub fn u16(&mut self) -> Result<u16, Error> {
        Ok(u16::from_be_bytes(*self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_be_bytes(*self.array()?))
    }

    pub fn opaque_u16(&mut self) -> Result<&'a [u8], Error> {
        let length = self.u16()?;
        self.take(usize::from(length))
    }

    pub fn opaque_u32(&mut self) -> Result<&'a [u8], Error> {
        let length = u32::from_be_bytes(*self.array()?);
        let length = usize::try_from(length)
            .map_err(|_| Error::Decode(format!("{}: length {length} is too large", self.what)))?;
        self.take(length)
    }

    /// An opaque string that must not be empty.
    fn filled(&self, field: &str, bytes: &'a [u8]) -> Result<&'a [u8], Error> {
        if bytes.is_empty() {
            return Err(Error::Decode(format!("{}: {field} must not be empty", self.what)));
        }
        Ok(bytes)
    }

    pub fn finish(&self) -> Result<(), Error> {
        match self.bytes.len() - self.position {
            0 => Ok(()),
            rest => Err(Error::Decode(format!("{}: {rest} bytes too many at the end", self.what))),
        }
    }
}

pub fn put_opaque_u16(out: &mut Vec<u8>, bytes: &[u8]) {
    // Only called with values whose length this module fixes: keys of 32 bytes.
    out.extend_from_slice(&(bytes.len() as u16).to_be_bytes());
    out.extend_from_slice(bytes);
}

pub fn put_opaque_u32(out: &mut Vec<u8>, bytes: &[u8]) {
    // A share or message of the largest vector (2^20 elements of 16 bytes) is far below 2^32.
    out.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
    out.extend_from_slice(bytes);
}

/// `HpkeCiphertext`.
#[derive(Clone, Copy, Debug)]
pub struct Ciphertext<'a> {
    pub config_id: u8,
    pub enc: &'a [u8],
    pub payload: &'a [u8],
}

impl<'a> Ciphertext<'a> {
    pub fn read(reader: &mut Reader<'a>) -> Result<Self, Error> {
        let config_id = reader.u8()?;
        let enc = reader.opaque_u16()?;
        let enc = reader.filled("enc", enc)?;
        let payload = reader.opaque_u32()?;
        let payload = reader.filled("payload", payload)?;
        Ok(Self { config_id, enc, payload })
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.config_id);
        put_opaque_u16(out, self.enc);
        put_opaque_u32(out, self.payload);
    }
}

/// `ReportMetadata` and the public share, as they occur together in reports and report shares.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    pub id: &'a [u8; ID_SIZE],
    pub time: u64,
    /// No report extension is known here, and a report with an unknown one is invalid.
    pub has_extensions: bool,
    pub public_share: &'a [u8],
    /// The header as it came: the end of the associated data.
    pub bytes: &'a [u8],
}

impl<'a> Header<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, Error> {
        let start = reader.position();
        let id = reader.array()?;
        let time = reader.u64()?;
        let has_extensions = !reader.opaque_u16()?.is_empty();
        let public_share = reader.opaque_u32()?;
        Ok(Self { id, time, has_extensions, public_share, bytes: reader.since(start) })
    }

    /// Appends a header without extensions.
    pub fn encode(out: &mut Vec<u8>, id: &[u8], time: u64, public_share: &[u8]) {
        out.extend_from_slice(id);
        out.extend_from_slice(&time.to_be_bytes());
        put_opaque_u16(out, &[]);
        put_opaque_u32(out, public_share);
    }
}

/// `Report`, as uploaded.
pub struct Report<'a> {
    pub header: Header<'a>,
    pub leader: Ciphertext<'a>,
    /// The helper's ciphertext as it came: the leader passes it on.
    pub helper: &'a [u8],
    pub end: usize,
}

/// `VerifyInit`: the helper's report share and the leader's first message.
pub struct VerifyInit<'a> {
    pub header: Header<'a>,
    pub ciphertext: Ciphertext<'a>,
    pub message: &'a [u8],
    pub end: usize,
}

/// `VerifyResp`, for one round: the helper's last message, or why it left the report out.
pub struct VerifyResp<'a> {
    pub id: &'a [u8; ID_SIZE],
    pub outcome: Result<&'a [u8], ReportError>,
}

const CONTINUE: u8 = 0;
const REJECT: u8 = 2;

pub fn read_reports(bytes: &[u8]) -> Result<Vec<Report<'_>>, Error> {
    let mut reader = Reader::new(bytes, "reports");
    let mut reports = Vec::new();
    while !reader.is_empty() {
        let header = Header::read(&mut reader)?;
        let leader = Ciphertext::read(&mut reader)?;
        let start = reader.position();
        Ciphertext::read(&mut reader)?;
        reports.push(Report {
            header,
            leader,
            helper: reader.since(start),
            end: reader.position(),
        });
    }
    Ok(reports)
}

/// Also refuses two shares of one report: such a job must fail as a whole (section 4.6.3.2).
pub fn read_verify_inits(bytes: &[u8]) -> Result<Vec<VerifyInit<'_>>, Error> {
    let mut reader = Reader::new(bytes, "verify_inits");
    let mut inits = Vec::new();
    let mut seen = HashSet::new();
    while !reader.is_empty() {
        let header = Header::read(&mut reader)?;
        let ciphertext = Ciphertext::read(&mut reader)?;
        let message = reader.opaque_u32()?;
        let message = reader.filled("payload", message)?;
        if !seen.insert(header.id) {
            return Err(Error::Decode(
                "verify_inits: two report shares with the same report id".into(),
            ));
        }
        inits.push(VerifyInit { header, ciphertext, message, end: reader.position() });
    }
    Ok(inits)
}

pub fn read_verify_resps(bytes: &[u8]) -> Result<Vec<VerifyResp<'_>>, Error> {
    let mut reader = Reader::new(bytes, "verify_resps");
    let mut resps = Vec::new();
    while !reader.is_empty() {
        let id = reader.array()?;
        let outcome = match reader.u8()? {
            CONTINUE => {
                let message = reader.opaque_u32()?;
                Ok(reader.filled("payload", message)?)
            }
            REJECT => {
                let code = reader.u8()?;
                Err(ReportError::from_code(code).ok_or_else(|| {
                    Error::Decode(format!("verify_resps: unknown report error {code}"))
                })?)
            }
            other => {
                return Err(Error::Decode(format!(
                    "verify_resps: response type {other} does not fit a one-round VDAF"
                )));
            }
        };
        resps.push(VerifyResp { id, outcome });
    }
    Ok(resps)
}

pub fn put_verify_resp(
    out: &mut Vec<u8>,
    id: &[u8; ID_SIZE],
    outcome: &Result<Vec<u8>, ReportError>,
) {
    out.extend_from_slice(id);
    match outcome {
        Ok(message) => {
            out.push(CONTINUE);
            put_opaque_u32(out, message);
        }
        Err(error) => out.extend_from_slice(&[REJECT, error.code()]),
    }
}
