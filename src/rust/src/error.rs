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

macro_rules! report_errors {
    ($($variant:ident = $code:literal: $name:literal,)*) => {
        /// `ReportError` of draft-ietf-ppm-dap-18, section 4.2: why one report was left out.
        ///
        /// Python's `ReportError` is created from `NAMED`. The draft reserves the code 0; here it means "no error".
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum ReportError {
            $($variant = $code,)*
        }

        impl ReportError {
            pub const NAMED: &[(&str, Self)] = &[$(($name, Self::$variant),)*];
        }
    };
}

report_errors! {
    BatchCollected = 1: "BATCH_COLLECTED",
    ReportReplayed = 2: "REPORT_REPLAYED",
    ReportDropped = 3: "REPORT_DROPPED",
    HpkeUnknownConfigId = 4: "HPKE_UNKNOWN_CONFIG_ID",
    HpkeDecryptError = 5: "HPKE_DECRYPT_ERROR",
    VdafVerifyError = 6: "VDAF_VERIFY_ERROR",
    TaskExpired = 7: "TASK_EXPIRED",
    InvalidMessage = 8: "INVALID_MESSAGE",
    ReportTooEarly = 9: "REPORT_TOO_EARLY",
    TaskNotStarted = 10: "TASK_NOT_STARTED",
    OutdatedConfig = 11: "OUTDATED_CONFIG",
}

impl ReportError {
    pub fn code(self) -> u8 {
        self as u8
    }

    pub fn from_code(code: u8) -> Option<Self> {
        Self::NAMED.iter().find(|(_, error)| error.code() == code).map(|(_, error)| *error)
    }
}
