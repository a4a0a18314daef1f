//! One object-safe interface to every Prio3 instance, report by report, bytes in and bytes out.
//!
//! `prio`'s own traits can't be used as objects (generic methods, `Clone`). States, output shares and
//! sums stay typed inside boxes that only the instance that created them can open.

use std::any::Any;

use prio::codec::{Decode, Encode, ParameterizedDecode};
use prio::field::{FieldElementWithInteger, NttFriendlyFieldElement};
use prio::flp::Type;
use prio::topology::ping_pong::{Continued, PingPongMessage, PingPongState, PingPongTopology};
use prio::vdaf::prio3::{
    Prio3, Prio3PublicShare, Prio3VerifierShare, Prio3VerifyState, optimal_chunk_length,
};
use prio::vdaf::xof::Xof;
use prio::vdaf::{
    Aggregatable, AggregateShare, Aggregator, Client, Collector, OutputShare, Vdaf, VdafError,
    VerifyTransition,
};

use crate::error::{Error, ReportError};

/// The most field elements that an encoded measurement may have: 16 MiB per share.
pub const MAX_ELEMENTS: usize = 1 << 20;

pub const NONCE_SIZE: usize = 16;
pub const VERIFY_KEY_SIZE: usize = 32;
const SEED_SIZE: usize = 32;
const AGGREGATORS: u8 = 2;
const HELPER: usize = 1;

pub type Nonce = [u8; NONCE_SIZE];
pub type VerifyKey = [u8; VERIFY_KEY_SIZE];

/// What the leader keeps of a report until the helper has answered.
pub struct State(Box<dyn Any + Send + Sync>);
/// One verified report's share of the result.
pub struct Output(Box<dyn Any + Send>);
/// The sum of output shares.
pub struct Sum(Box<dyn Any + Send>);

/// A sharded measurement.
pub struct Shares {
    pub public: Vec<u8>,
    pub leader: Vec<u8>,
    pub helper: Vec<u8>,
}

pub trait Engine: Send + Sync {
    fn algorithm_id(&self) -> u32;
    /// The number of entries of a result.
    fn output_len(&self) -> usize;
    fn shard(&self, ctx: &[u8], measurement: &[u64], nonce: &Nonce) -> Result<Shares, Error>;
    /// The state to keep and the message for the helper.
    fn leader_initialize(
        &self,
        key: &VerifyKey,
        ctx: &[u8],
        nonce: &Nonce,
        public_share: &[u8],
        input_share: &[u8],
    ) -> Result<(State, Vec<u8>), ReportError>;
    /// The verified share and the message for the leader.
    fn helper_initialize(
        &self,
        key: &VerifyKey,
        ctx: &[u8],
        nonce: &Nonce,
        public_share: &[u8],
        input_share: &[u8],
        message: &[u8],
    ) -> Result<(Output, Vec<u8>), ReportError>;
    fn leader_finish(
        &self,
        ctx: &[u8],
        state: State,
        message: &[u8],
    ) -> Result<Output, ReportError>;
    fn empty_sum(&self) -> Sum;
    fn accumulate(&self, sum: &mut Sum, output: &Output) -> Result<(), Error>;
    fn merge(&self, sum: &mut Sum, other: &Sum) -> Result<(), Error>;
    fn add_counts(&self, sum: &mut Sum, counts: &[u64]) -> Result<(), Error>;
    fn encode_sum(&self, sum: &Sum) -> Result<Vec<u8>, Error>;
    fn decode_sum(&self, bytes: &[u8]) -> Result<Sum, Error>;
    fn unshard(&self, sums: Vec<Sum>, reports: usize) -> Result<Vec<u128>, Error>;
}

impl<T, P> Engine for Prio3<T, P, SEED_SIZE>
where
    T: Type + Send + Sync,
    T::Field: Send + Sync,
    T::Measurement: FromValues,
    T::AggregateResult: IntoCounts,
    P: Xof<SEED_SIZE> + Send + Sync,
{
    fn algorithm_id(&self) -> u32 {
        Vdaf::algorithm_id(self)
    }

    fn output_len(&self) -> usize {
        Prio3::output_len(self)
    }

    fn shard(&self, ctx: &[u8], measurement: &[u64], nonce: &Nonce) -> Result<Shares, Error> {
        let measurement = T::Measurement::from_values(measurement)?;
        let (public, inputs) = Client::shard(self, ctx, &measurement, nonce)
            .map_err(|error| Error::InvalidInput(format!("measurement refused: {error}")))?;
        let mut encoded = inputs.iter().map(|share| share.get_encoded().map_err(internal));
        let missing = || Error::Internal("sharding made too few shares".into());
        Ok(Shares {
            public: public.get_encoded().map_err(internal)?,
            leader: encoded.next().ok_or_else(missing)??,
            helper: encoded.next().ok_or_else(missing)??,
        })
    }

    fn leader_initialize(
        &self,
        key: &VerifyKey,
        ctx: &[u8],
        nonce: &Nonce,
        public_share: &[u8],
        input_share: &[u8],
    ) -> Result<(State, Vec<u8>), ReportError> {
        let public_share = decode_public(self, public_share)?;
        let input_share = ParameterizedDecode::get_decoded_with_param(&(self, 0), input_share)
            .map_err(|_| ReportError::InvalidMessage)?;
        let Continued { message, verifier_state } = self
            .leader_initialized(key, ctx, &(), nonce, &public_share, &input_share)
            .map_err(|_| ReportError::VdafVerifyError)?;
        let message = message.get_encoded().map_err(|_| ReportError::VdafVerifyError)?;
        Ok((State(Box::new(verifier_state)), message))
    }

    fn helper_initialize(
        &self,
        key: &VerifyKey,
        ctx: &[u8],
        nonce: &Nonce,
        public_share: &[u8],
        input_share: &[u8],
        message: &[u8],
    ) -> Result<(Output, Vec<u8>), ReportError> {
        let stated = public_share;
        let public_share = decode_public(self, public_share)?;
        let input_share = ParameterizedDecode::get_decoded_with_param(&(self, 1), input_share)
            .map_err(|_| ReportError::InvalidMessage)?;
        let message =
            PingPongMessage::get_decoded(message).map_err(|_| ReportError::InvalidMessage)?;
        let PingPongMessage::Initialize { verifier_share: leaders } = message else {
            return Err(ReportError::VdafVerifyError);
        };
        let (state, own) = self
            .verify_init(key, ctx, HELPER, &(), nonce, &public_share, &input_share)
            .map_err(|_| ReportError::VdafVerifyError)?;
        check_own_part(stated, &own)?;
        let leaders = ParameterizedDecode::get_decoded_with_param(&state, &leaders)
            .map_err(|_| ReportError::InvalidMessage)?;
        let message = self
            .verifier_shares_to_message(ctx, &(), [leaders, own])
            .map_err(|_| ReportError::VdafVerifyError)?;
        let verifier_message = message.get_encoded().map_err(|_| ReportError::VdafVerifyError)?;
        match self.verify_next(ctx, state, message) {
            Ok(VerifyTransition::Finish(output)) => {
                let message = PingPongMessage::Finish { verifier_message }
                    .get_encoded()
                    .map_err(|_| ReportError::VdafVerifyError)?;
                Ok((Output(Box::new(output)), message))
            }
            _ => Err(ReportError::VdafVerifyError),
        }
    }

    fn leader_finish(
        &self,
        ctx: &[u8],
        state: State,
        message: &[u8],
    ) -> Result<Output, ReportError> {
        let state = state
            .0
            .downcast::<Prio3VerifyState<T::Field, SEED_SIZE>>()
            .map_err(|_| ReportError::VdafVerifyError)?;
        let message =
            PingPongMessage::get_decoded(message).map_err(|_| ReportError::InvalidMessage)?;
        let next = self
            .leader_continued(ctx, &(), *state, &message)
            .and_then(|continuation| continuation.evaluate(ctx, self));
        match next {
            Ok(PingPongState::Finished { output_share }) => Ok(Output(Box::new(output_share))),
            _ => Err(ReportError::VdafVerifyError),
        }
    }

    fn empty_sum(&self) -> Sum {
        Sum(Box::new(self.aggregate_init(&())))
    }

    fn accumulate(&self, sum: &mut Sum, output: &Output) -> Result<(), Error> {
        let output = output.0.downcast_ref::<OutputShare<T::Field>>().ok_or_else(foreign)?;
        share_mut::<T>(sum)?.accumulate(output).map_err(internal)
    }

    fn merge(&self, sum: &mut Sum, other: &Sum) -> Result<(), Error> {
        share_mut::<T>(sum)?.merge(share::<T>(other)?).map_err(internal)
    }

    fn add_counts(&self, sum: &mut Sum, counts: &[u64]) -> Result<(), Error> {
        let elements = counts
            .iter()
            .map(|count| {
                usize::try_from(*count)
                    .ok()
                    .and_then(|count| {
                        <T::Field as FieldElementWithInteger>::Integer::try_from(count).ok()
                    })
                    .map(T::Field::from)
            })
            .collect::<Option<Vec<T::Field>>>()
            .ok_or_else(|| Error::InvalidInput("a count is too large for the field".into()))?;
        share_mut::<T>(sum)?.merge(&AggregateShare::from(elements)).map_err(|_| {
            Error::InvalidInput(format!("{} counts are needed, one an entry", self.output_len()))
        })
    }

    fn encode_sum(&self, sum: &Sum) -> Result<Vec<u8>, Error> {
        share::<T>(sum)?.get_encoded().map_err(internal)
    }

    fn decode_sum(&self, bytes: &[u8]) -> Result<Sum, Error> {
        AggregateShare::<T::Field>::get_decoded_with_param(&(self, &()), bytes)
            .map(|share| Sum(Box::new(share)))
            .map_err(|error| Error::Decode(format!("aggregate share: {error}")))
    }

    fn unshard(&self, sums: Vec<Sum>, reports: usize) -> Result<Vec<u128>, Error> {
        let shares =
            sums.iter().map(|sum| share::<T>(sum).cloned()).collect::<Result<Vec<_>, _>>()?;
        Collector::unshard(self, &(), shares, reports)
            .map(IntoCounts::into_counts)
            .map_err(|error| Error::Decode(format!("aggregate shares do not fit: {error}")))
    }
}

fn decode_public<T: Type, P: Xof<SEED_SIZE>>(
    vdaf: &Prio3<T, P, SEED_SIZE>,
    bytes: &[u8],
) -> Result<Prio3PublicShare<SEED_SIZE>, ReportError> {
    ParameterizedDecode::get_decoded_with_param(vdaf, bytes)
        .map_err(|_| ReportError::InvalidMessage)
}

/// Refuses a report whose public share states another joint-randomness part for the helper than the
/// helper computed from its own share.
///
/// `prio` replaces the stated part by the computed one, and leaves it to the joint-randomness check of
/// *the others* to notice. The leader is told last, and it alone would notice here: a proof that passes
/// under every randomness (identically 0, say) would be counted by the helper and refused by the leader,
/// and the batch could never be collected. With this check the two always agree. Let (p0, p1) be the
/// stated parts, and l the part that the leader computed and sent. If the helper accepts, its own part is
/// p1 (here), and H(p0, p1) = H(l, p1) (`verify_next`), so l = p0 unless the hash collides. The leader's
/// own seed is H(l, p1), which is the one that the helper sends: the leader accepts too, for the seed is
/// all that it checks. If the helper refuses, the leader has no message to accept.
fn check_own_part<F: NttFriendlyFieldElement>(
    stated: &[u8],
    own: &Prio3VerifierShare<F, SEED_SIZE>,
) -> Result<(), ReportError> {
    // One part per aggregator, the helper's last; empty where the VDAF has no joint randomness.
    let Some(stated) = stated.last_chunk::<SEED_SIZE>() else {
        return Ok(());
    };
    let encoded = own.get_encoded().map_err(|_| ReportError::VdafVerifyError)?;
    match encoded.last_chunk::<SEED_SIZE>() {
        Some(computed) if computed == stated => Ok(()),
        _ => Err(ReportError::VdafVerifyError),
    }
}

fn share<T: Type>(sum: &Sum) -> Result<&AggregateShare<T::Field>, Error> {
    sum.0.downcast_ref().ok_or_else(foreign)
}

fn share_mut<T: Type>(sum: &mut Sum) -> Result<&mut AggregateShare<T::Field>, Error> {
    sum.0.downcast_mut().ok_or_else(foreign)
}

fn foreign() -> Error {
    Error::Internal("a value of another Prio3 instance".into())
}

fn internal(error: impl std::fmt::Display) -> Error {
    Error::Internal(error.to_string())
}

/// How a list of numbers becomes a measurement of one of `prio`'s types.
pub trait FromValues: Sized {
    fn from_values(values: &[u64]) -> Result<Self, Error>;
}

fn single(values: &[u64]) -> Result<u64, Error> {
    match values {
        [value] => Ok(*value),
        _ => Err(Error::InvalidInput(format!("one number is needed, got {}", values.len()))),
    }
}

fn bit(value: u64) -> Result<bool, Error> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::InvalidInput(format!("a bit must be 0 or 1, got {other}"))),
    }
}

impl FromValues for bool {
    fn from_values(values: &[u64]) -> Result<Self, Error> {
        bit(single(values)?)
    }
}

impl FromValues for u64 {
    fn from_values(values: &[u64]) -> Result<Self, Error> {
        single(values)
    }
}

impl FromValues for usize {
    fn from_values(values: &[u64]) -> Result<Self, Error> {
        usize::try_from(single(values)?).map_err(|error| Error::InvalidInput(error.to_string()))
    }
}

impl FromValues for Vec<bool> {
    fn from_values(values: &[u64]) -> Result<Self, Error> {
        values.iter().map(|value| bit(*value)).collect()
    }
}

impl FromValues for Vec<u128> {
    fn from_values(values: &[u64]) -> Result<Self, Error> {
        Ok(values.iter().map(|value| u128::from(*value)).collect())
    }
}

/// How a result of one of `prio`'s types becomes a list of numbers.
pub trait IntoCounts {
    fn into_counts(self) -> Vec<u128>;
}

impl IntoCounts for u64 {
    fn into_counts(self) -> Vec<u128> {
        vec![u128::from(self)]
    }
}

impl IntoCounts for Vec<u128> {
    fn into_counts(self) -> Vec<u128> {
        self
    }
}

/// The instances on offer. Chorister's own reports are `MultihotCountVec` (bounded) and `SumVec` (plain);
/// the others are there because the published test vectors and DAP's other tasks use them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Count,
    Sum { max_measurement: u64 },
    SumVec { length: usize, max_measurement: u64 },
    Histogram { length: usize },
    MultihotCountVec { length: usize, max_weight: usize },
}

impl Kind {
    /// The number of field elements of an encoded measurement; too many are refused.
    fn elements(&self) -> Result<usize, Error> {
        let bits = |largest: u64| largest.checked_ilog2().map(|log| log as usize + 1);
        let zero =
            || Error::InvalidInput("max_measurement and max_weight must be at least 1".into());
        let (length, elements) = match *self {
            Self::Count => (1, Some(1)),
            Self::Sum { max_measurement } => (1, Some(bits(max_measurement).ok_or_else(zero)?)),
            Self::SumVec { length, max_measurement } => {
                (length, length.checked_mul(bits(max_measurement).ok_or_else(zero)?))
            }
            Self::Histogram { length } => (length, Some(length)),
            Self::MultihotCountVec { length, max_weight } => {
                if max_weight > length {
                    return Err(Error::InvalidInput(format!(
                        "max_weight must be 1 to the length {length}, got {max_weight}"
                    )));
                }
                let weight_bits = bits(max_weight as u64).ok_or_else(zero)?;
                (length, length.checked_add(weight_bits))
            }
        };
        match elements {
            Some(elements) if length > 0 && elements <= MAX_ELEMENTS => Ok(elements),
            _ => Err(Error::InvalidInput(format!(
                "length must be at least 1, and a measurement at most {MAX_ELEMENTS} elements \
                 (length times bits), got length {length}"
            ))),
        }
    }

    /// The largest value that one report can add to an entry of the result.
    pub fn max_entry(&self) -> u64 {
        match *self {
            Self::Sum { max_measurement } | Self::SumVec { max_measurement, .. } => max_measurement,
            _ => 1,
        }
    }

    /// Builds the instance. Also returns its chunk length: the given one, or the crate's optimum.
    pub fn engine(&self, chunk_length: Option<usize>) -> Result<(Box<dyn Engine>, usize), Error> {
        let elements = self.elements()?;
        let chunk = chunk_length.unwrap_or_else(|| optimal_chunk_length(elements));
        if chunk == 0 || chunk > elements {
            return Err(Error::InvalidInput(format!(
                "chunk_length must be 1 to {elements}, got {chunk}"
            )));
        }
        let built: Result<Box<dyn Engine>, VdafError> = match *self {
            Self::Count => Prio3::new_count(AGGREGATORS).map(|vdaf| Box::new(vdaf) as _),
            Self::Sum { max_measurement } => {
                Prio3::new_sum(AGGREGATORS, max_measurement).map(|vdaf| Box::new(vdaf) as _)
            }
            Self::SumVec { length, max_measurement } => {
                Prio3::new_sum_vec(AGGREGATORS, max_measurement.into(), length, chunk)
                    .map(|vdaf| Box::new(vdaf) as _)
            }
            Self::Histogram { length } => {
                Prio3::new_histogram(AGGREGATORS, length, chunk).map(|vdaf| Box::new(vdaf) as _)
            }
            Self::MultihotCountVec { length, max_weight } => {
                Prio3::new_multihot_count_vec(AGGREGATORS, length, max_weight, chunk)
                    .map(|vdaf| Box::new(vdaf) as _)
            }
        };
        let engine = built.map_err(|error| Error::InvalidInput(error.to_string()))?;
        Ok((engine, chunk))
    }
}
