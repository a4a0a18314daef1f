//! The yardstick of `benchmarks/native.py`: a plain loop over `prio` and `hpke-dispatch`, one thread,
//! nothing of this crate. Its helper is the plain ping-pong one, without this crate's comparison of the
//! joint-randomness part that the public share states. Prints microseconds of thread CPU time a report as one JSON object.
//!
//! Usage: plain_loop LENGTH MAX_WEIGHT REPORTS

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use cpu_time::ThreadTime;
use hpke_dispatch::{Aead, Config, EncappedKeyAndCiphertext, Kdf, Kem, gen_keypair};
use prio::codec::{Decode, Encode, ParameterizedDecode};
use prio::topology::ping_pong::{PingPongMessage, PingPongState, PingPongTopology};
use prio::vdaf::prio3::{
    Prio3, Prio3InputShare, Prio3MultihotCountVec, Prio3PublicShare, optimal_chunk_length,
};
use prio::vdaf::{Aggregatable, Aggregator, Client};

const SUITE: Config =
    Config { aead: Aead::AesGcm128, kdf: Kdf::Sha256, kem: Kem::X25519HkdfSha256 };

/// A report as the wire has it, less the framing.
struct Report {
    nonce: [u8; 16],
    public: Vec<u8>,
    aad: Vec<u8>,
    sealed: [EncappedKeyAndCiphertext; 2],
}

const STEPS: [&str; 7] =
    ["shard", "seal", "leader_open", "helper_open", "leader_init", "helper_init", "leader_finish"];

/// Rounds in one process, the best counts: the first pays for memory that is fresh.
const ROUNDS: usize = 3;

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let rounds: Vec<[f64; 7]> =
        (0..ROUNDS).map(|_| round(arguments[0], arguments[1], arguments[2])).collect();
    let best: serde_json::Map<String, serde_json::Value> = STEPS
        .iter()
        .enumerate()
        .map(|(i, step)| {
            let least = rounds.iter().map(|round| round[i]).fold(f64::INFINITY, f64::min);
            (step.to_string(), least.into())
        })
        .collect();
    println!("{}", serde_json::Value::Object(best));
}

fn round(length: usize, max_weight: usize, n: usize) -> [f64; 7] {
    let elements = length + max_weight.ilog2() as usize + 1;
    let vdaf: Prio3MultihotCountVec =
        Prio3::new_multihot_count_vec(2, length, max_weight, optimal_chunk_length(elements))
            .unwrap();
    let keys = [gen_keypair(SUITE.kem), gen_keypair(SUITE.kem)];
    let infos: [&[u8]; 2] = [b"leader", b"helper"];
    let (ctx, verify_key) = (b"context".as_slice(), [7; 32]);
    let micros = |start: ThreadTime| start.elapsed().as_secs_f64() * 1e6 / n as f64;

    let measurements: Vec<Vec<bool>> = (0..n)
        .map(|i| (0..length).map(|j| (i + j) * max_weight % (2 * length) < max_weight).collect())
        .collect();
    let start = ThreadTime::now();
    let sharded: Vec<_> = measurements
        .iter()
        .enumerate()
        .map(|(i, measurement)| {
            let nonce = (i as u128).to_be_bytes();
            let (public, shares) = vdaf.shard(ctx, measurement, &nonce).unwrap();
            let shares: Vec<Vec<u8>> = shares.iter().map(|s| s.get_encoded().unwrap()).collect();
            (nonce, public.get_encoded().unwrap(), shares)
        })
        .collect();
    let shard = micros(start);

    let start = ThreadTime::now();
    let reports: Vec<Report> = sharded
        .into_iter()
        .map(|(nonce, public, shares)| {
            let aad = [vec![9; 300], nonce.to_vec(), public.clone()].concat();
            let sealed = [0, 1].map(|i| {
                SUITE.base_mode_seal(&keys[i].public_key, infos[i], &shares[i], &aad).unwrap()
            });
            Report { nonce, public, aad, sealed }
        })
        .collect();
    let seal = micros(start);

    let open = |report: &Report, i: usize| {
        let sealed = &report.sealed[i];
        SUITE
            .base_mode_open(
                &keys[i].private_key,
                &sealed.encapped_key,
                infos[i],
                &sealed.ciphertext,
                &report.aad,
            )
            .unwrap()
    };

    let [leader_open, helper_open] = [0, 1].map(|i| {
        let start = ThreadTime::now();
        for report in &reports {
            std::hint::black_box(open(report, i));
        }
        micros(start)
    });

    let start = ThreadTime::now();
    let leader: Vec<_> = reports
        .iter()
        .map(|report| {
            let share = open(report, 0);
            let public = Prio3PublicShare::get_decoded_with_param(&vdaf, &report.public).unwrap();
            let input = Prio3InputShare::get_decoded_with_param(&(&vdaf, 0), &share).unwrap();
            let continued = vdaf
                .leader_initialized(&verify_key, ctx, &(), &report.nonce, &public, &input)
                .unwrap();
            (continued.verifier_state, continued.message.get_encoded().unwrap())
        })
        .collect();
    let leader_init = micros(start);

    let start = ThreadTime::now();
    let mut helper_sum = vdaf.aggregate_init(&());
    let answers: Vec<Vec<u8>> = reports
        .iter()
        .zip(&leader)
        .map(|(report, (_, message))| {
            let share = open(report, 1);
            let public = Prio3PublicShare::get_decoded_with_param(&vdaf, &report.public).unwrap();
            let input = Prio3InputShare::get_decoded_with_param(&(&vdaf, 1), &share).unwrap();
            let message = PingPongMessage::get_decoded(message).unwrap();
            let state = vdaf
                .helper_initialized(&verify_key, ctx, &(), &report.nonce, &public, &input, &message)
                .and_then(|continuation| continuation.evaluate(ctx, &vdaf));
            match state {
                Ok(PingPongState::FinishedWithOutbound { output_share, message }) => {
                    helper_sum.accumulate(&output_share).unwrap();
                    message.get_encoded().unwrap()
                }
                _ => unreachable!("an honest report"),
            }
        })
        .collect();
    let helper_init = micros(start);

    let start = ThreadTime::now();
    let mut leader_sum = vdaf.aggregate_init(&());
    for ((state, _), answer) in leader.into_iter().zip(&answers) {
        let message = PingPongMessage::get_decoded(answer).unwrap();
        let state = vdaf
            .leader_continued(ctx, &(), state, &message)
            .and_then(|continuation| continuation.evaluate(ctx, &vdaf));
        match state {
            Ok(PingPongState::Finished { output_share }) => {
                leader_sum.accumulate(&output_share).unwrap();
            }
            _ => unreachable!("an honest report"),
        }
    }
    let leader_finish = micros(start);

    [shard, seal, leader_open, helper_open, leader_init, helper_init, leader_finish]
}
