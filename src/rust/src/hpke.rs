//! HPKE base mode with the one suite that Chorister speaks: X25519, HKDF-SHA256, AES-128-GCM.

use rustls::crypto::aws_lc_rs::hpke::DH_KEM_X25519_HKDF_SHA256_AES_128 as SUITE;
use rustls::crypto::hpke::{EncapsulatedSecret, Hpke, HpkePrivateKey, HpkePublicKey};
use zeroize::Zeroizing;

use crate::error::Error;
use crate::wire::{Ciphertext, Reader, put_opaque_u16};

const KEM_ID: u16 = 0x0020;
const KDF_ID: u16 = 0x0001;
const AEAD_ID: u16 = 0x0001;
const KEY_SIZE: usize = 32;

/// `HpkeConfig` of draft-ietf-ppm-dap-18, section 4.5.1: a public key and its identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HpkeConfig {
    pub id: u8,
    public_key: [u8; KEY_SIZE],
}

impl HpkeConfig {
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(bytes, "HpkeConfig");
        let id = reader.u8()?;
        let (kem, kdf, aead) = (reader.u16()?, reader.u16()?, reader.u16()?);
        let public_key = reader.opaque_u16()?;
        reader.finish()?;
        if (kem, kdf, aead) != (KEM_ID, KDF_ID, AEAD_ID) {
            return Err(Error::UnsupportedSuite(format!(
                "HPKE suite {} / {} / {} is not supported: use X25519 / HKDF-SHA256 / AES-128-GCM",
                kem_name(kem),
                kdf_name(kdf),
                aead_name(aead),
            )));
        }
        Ok(Self { id, public_key: key(public_key, "public key")? })
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.id];
        for id in [KEM_ID, KDF_ID, AEAD_ID] {
            out.extend_from_slice(&id.to_be_bytes());
        }
        put_opaque_u16(&mut out, &self.public_key);
        out
    }

    /// Appends an encoded `HpkeCiphertext`.
    pub fn seal(
        &self,
        info: &[u8],
        aad: &[u8],
        plaintext: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let public_key = HpkePublicKey(self.public_key.to_vec());
        let (enc, payload) = SUITE
            .seal(info, aad, plaintext, &public_key)
            .map_err(|error| Error::Hpke(format!("cannot seal to this public key: {error}")))?;
        Ciphertext { config_id: self.id, enc: &enc.0, payload: &payload }.encode(out);
        Ok(())
    }
}

/// A recipient's key pair. Its private key never prints and is wiped when dropped.
pub struct HpkeKeypair {
    pub config: HpkeConfig,
    private_key: HpkePrivateKey,
}

impl HpkeKeypair {
    pub fn generate(id: u8) -> Result<Self, Error> {
        let (public_key, private_key) = SUITE
            .generate_key_pair()
            .map_err(|error| Error::Hpke(format!("cannot generate a key pair: {error}")))?;
        Self::from_parts(id, &public_key.0, private_key.secret_bytes())
    }

    /// Refuses a private key that does not belong to the public key.
    pub fn from_parts(id: u8, public_key: &[u8], private_key: &[u8]) -> Result<Self, Error> {
        let pair = Self {
            config: HpkeConfig { id, public_key: key(public_key, "public key")? },
            private_key: Zeroizing::new(key(private_key, "private key")?).to_vec().into(),
        };
        let mut sealed = Vec::new();
        pair.config.seal(b"", b"", b"", &mut sealed)?;
        let mut reader = Reader::new(&sealed, "HpkeCiphertext");
        pair.open(&Ciphertext::read(&mut reader)?, b"", b"")
            .map_err(|_| Error::Hpke("the private key does not belong to the public key".into()))?;
        Ok(pair)
    }

    pub fn public_key(&self) -> &[u8] {
        &self.config.public_key
    }

    pub fn private_key(&self) -> &[u8] {
        self.private_key.secret_bytes()
    }

    pub fn open(
        &self,
        ciphertext: &Ciphertext<'_>,
        info: &[u8],
        aad: &[u8],
    ) -> Result<Vec<u8>, Error> {
        let enc = EncapsulatedSecret(ciphertext.enc.to_vec());
        SUITE
            .open(&enc, info, aad, ciphertext.payload, &self.private_key)
            .map_err(|_| Error::Hpke("cannot open: another key, or altered bytes".into()))
    }
}

fn key(bytes: &[u8], what: &str) -> Result<[u8; KEY_SIZE], Error> {
    bytes.try_into().map_err(|_| {
        Error::Hpke(format!("an X25519 {what} has {KEY_SIZE} bytes, got {}", bytes.len()))
    })
}

fn kem_name(id: u16) -> String {
    match id {
        0x0010 => "DHKEM(P-256)".into(),
        0x0011 => "DHKEM(P-384)".into(),
        0x0012 => "DHKEM(P-521)".into(),
        KEM_ID => "X25519".into(),
        0x0021 => "X448".into(),
        0x647a => "X-Wing".into(),
        _ => format!("KEM {id:#06x}"),
    }
}

fn kdf_name(id: u16) -> String {
    match id {
        KDF_ID => "HKDF-SHA256".into(),
        0x0002 => "HKDF-SHA384".into(),
        0x0003 => "HKDF-SHA512".into(),
        _ => format!("KDF {id:#06x}"),
    }
}

fn aead_name(id: u16) -> String {
    match id {
        AEAD_ID => "AES-128-GCM".into(),
        0x0002 => "AES-256-GCM".into(),
        0x0003 => "ChaCha20Poly1305".into(),
        0xffff => "export-only".into(),
        _ => format!("AEAD {id:#06x}"),
    }
}
