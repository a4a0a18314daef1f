//! What can go wrong, for a whole call (`Error`) and for one report (`ReportError`).

/// A call that could not be carried out. Each becomes an exception of `chorister.errors`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    InvalidInput(String),
    #[error("{0}")]
    Decode(String),
    #[error("{0}")]
    Hpke(String),
    #[error("{0}")]
    UnsupportedSuite(String),
    #[error("internal error in the native module: {0}; nothing was released, please report this")]
    Internal(String),
}

/// `ReportError` of draft-ietf-ppm-dap-18, section 4.2: why one report was left out.
///
/// The code 0 is reserved there; in this module it stands for "no error".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReportError {
    BatchCollected = 1,
    ReportReplayed = 2,
    ReportDropped = 3,
    HpkeUnknownConfigId = 4,
    HpkeDecryptError = 5,
    VdafVerifyError = 6,
    TaskExpired = 7,
    InvalidMessage = 8,
    ReportTooEarly = 9,
    TaskNotStarted = 10,
    OutdatedConfig = 11,
}

impl ReportError {
    const ALL: [Self; 11] = [
        Self::BatchCollected,
        Self::ReportReplayed,
        Self::ReportDropped,
        Self::HpkeUnknownConfigId,
        Self::HpkeDecryptError,
        Self::VdafVerifyError,
        Self::TaskExpired,
        Self::InvalidMessage,
        Self::ReportTooEarly,
        Self::TaskNotStarted,
        Self::OutdatedConfig,
    ];

    pub fn code(self) -> u8 {
        self as u8
    }

    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|error| error.code() == code)
    }
}
