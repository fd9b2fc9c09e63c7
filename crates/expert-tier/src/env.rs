//! The environment, read in this module alone.
//!
//! *Errors* of every function: a variable that is set and cannot be parsed is an error that names
//! it, never a silent default.

use std::env;
use std::time::Duration;

use atlas_rdma::attributes::Mtu;
use atlas_rdma::choose::parse_rails;
use expert_store::info::parse_hex128;
use expert_store::token_file;
use expert_wire::auth::Token;

use crate::error::TierError;
use crate::peers::Sources;
use crate::rails::verbs::{RailSlot, RailsWanted, VerbsOptions};

/// Who has not got a small record after a millisecond sleeps better.
const SPIN_MAX_US: u64 = 1000;

/// Device of the first rail where it exists: the first users' machines have it.
const FIRST_DEVICE: &str = "roceP2p1s0f1";
/// ... and of the second.
const SECOND_DEVICE: &str = "rocep1s0f1";

/// `ATLAS_EXPERT_PEER`: `host:port` of the peer, or several with commas.
pub fn peer() -> Result<Option<String>, TierError> {
    let Some(value) = text("ATLAS_EXPERT_PEER")? else {
        return Ok(None);
    };
    Sources::of_peers(&value).map_err(|e| bad("ATLAS_EXPERT_PEER", &value, &e.to_string()))?;
    Ok(Some(value))
}

/// `ATLAS_EXPERT_TOKEN_FILE`: the token, from the file of that name.
pub fn auth_token() -> Result<Option<Token>, TierError> {
    text("ATLAS_EXPERT_TOKEN_FILE")?
        .map(|path| {
            token_file::read(path.as_ref()).map_err(|e| {
                TierError::Config(format!("environment variable ATLAS_EXPERT_TOKEN_FILE: {e}"))
            })
        })
        .transpose()
}

/// `ATLAS_EXPERT_CONTENT_ID`: the model to insist on, 32 hexadecimal digits.
pub fn content_id() -> Result<Option<u128>, TierError> {
    text("ATLAS_EXPERT_CONTENT_ID")?
        .map(|value| parse_hex128(&value).map_err(|e| bad("ATLAS_EXPERT_CONTENT_ID", &value, &e)))
        .transpose()
}

/// `ATLAS_EXPERT_SPIN_US`: microseconds of [`crate::config::EngineConfig::spin`], 0 to 1000.
pub fn spin() -> Result<Option<Duration>, TierError> {
    match number::<u64>("ATLAS_EXPERT_SPIN_US")? {
        Some(us) if us > SPIN_MAX_US => Err(bad(
            "ATLAS_EXPERT_SPIN_US",
            &us.to_string(),
            &format!("it is 0 (never) to {SPIN_MAX_US}"),
        )),
        us => Ok(us.map(Duration::from_micros)),
    }
}

/// The variables of verbs rails: `ATLAS_EXPERT_RAILS`, or `ATLAS_EXPERT_RDMA_DEV` and `_GID`, with
/// `ATLAS_EXPERT_DUAL_RAIL=1` and `ATLAS_EXPERT_RAIL2_DEV` and `_GID`; `ATLAS_EXPERT_MTU`,
/// `_TRAFFIC_CLASS`, `_SERVICE_LEVEL`, `_PKEY_INDEX`, `_QPS_PER_RAIL`.
pub fn verbs() -> Result<VerbsOptions, TierError> {
    let defaults = VerbsOptions::default();
    let options = VerbsOptions {
        rails: rails()?,
        mtu: match number::<u32>("ATLAS_EXPERT_MTU")? {
            None => None,
            Some(bytes) => Some(Mtu::from_bytes(bytes).ok_or_else(|| {
                let value = bytes.to_string();
                bad(
                    "ATLAS_EXPERT_MTU",
                    &value,
                    "it is none of 256, 512, 1024, 2048, 4096",
                )
            })?),
        },
        traffic_class: number("ATLAS_EXPERT_TRAFFIC_CLASS")?.unwrap_or(defaults.traffic_class),
        service_level: number("ATLAS_EXPERT_SERVICE_LEVEL")?.unwrap_or(defaults.service_level),
        pkey_index: number("ATLAS_EXPERT_PKEY_INDEX")?.unwrap_or(defaults.pkey_index),
        qps_per_rail: number("ATLAS_EXPERT_QPS_PER_RAIL")?.unwrap_or(defaults.qps_per_rail),
        ..defaults
    };
    options.check().map_err(TierError::Config)?;
    Ok(options)
}

fn rails() -> Result<RailsWanted, TierError> {
    if let Some(list) = text("ATLAS_EXPERT_RAILS")? {
        let specs =
            parse_rails(&list).map_err(|e| bad("ATLAS_EXPERT_RAILS", &list, &e.to_string()))?;
        return Ok(RailsWanted::List(specs));
    }
    let slot = |device, gid, preferred: &str| {
        Ok::<_, TierError>(RailSlot {
            device: text(device)?,
            gid_index: number(gid)?,
            preferred: Some(preferred.into()),
        })
    };
    let mut slots = vec![slot(
        "ATLAS_EXPERT_RDMA_DEV",
        "ATLAS_EXPERT_RDMA_GID",
        FIRST_DEVICE,
    )?];
    match text("ATLAS_EXPERT_DUAL_RAIL")?.as_deref() {
        None | Some("0") => {}
        Some("1") => slots.push(slot(
            "ATLAS_EXPERT_RAIL2_DEV",
            "ATLAS_EXPERT_RAIL2_GID",
            SECOND_DEVICE,
        )?),
        Some(other) => {
            return Err(bad(
                "ATLAS_EXPERT_DUAL_RAIL",
                other,
                "it is neither 0 nor 1",
            ));
        }
    }
    Ok(RailsWanted::Slots(slots))
}

fn number<T: std::str::FromStr>(name: &str) -> Result<Option<T>, TierError>
where
    T::Err: std::fmt::Display,
{
    text(name)?
        .map(|value| {
            value
                .trim()
                .parse()
                .map_err(|e: T::Err| bad(name, &value, &e.to_string()))
        })
        .transpose()
}

fn text(name: &str) -> Result<Option<String>, TierError> {
    match env::var(name) {
        Ok(value) if value.is_empty() => Ok(None),
        Ok(value) => Ok(Some(value)),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(value)) => {
            Err(bad(name, &value.to_string_lossy(), "it is not UTF-8"))
        }
    }
}

fn bad(name: &str, value: &str, why: &str) -> TierError {
    TierError::Config(format!("environment variable {name}={value:?}: {why}"))
}
