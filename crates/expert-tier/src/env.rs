//! The environment, read in this module alone.
//!
//! *Errors* of every function: a variable that is set and cannot be parsed is an error that names
//! it, never a silent default.

use std::env;

use expert_store::info::parse_hex128;

use crate::error::TierError;

/// `ATLAS_EXPERT_PEER`: `host:port` of the peer.
pub fn peer() -> Result<Option<String>, TierError> {
    let Some(value) = text("ATLAS_EXPERT_PEER")? else {
        return Ok(None);
    };
    if value.contains(',') {
        return Err(bad(
            "ATLAS_EXPERT_PEER",
            &value,
            "several peers are not supported yet; name one host:port",
        ));
    }
    crate::rails::socket::check_addr(&value)
        .map_err(|e| bad("ATLAS_EXPERT_PEER", &value, &e.to_string()))?;
    Ok(Some(value))
}

/// `ATLAS_EXPERT_CONTENT_ID`: the model to insist on, 32 hexadecimal digits.
pub fn content_id() -> Result<Option<u128>, TierError> {
    text("ATLAS_EXPERT_CONTENT_ID")?
        .map(|value| parse_hex128(&value).map_err(|e| bad("ATLAS_EXPERT_CONTENT_ID", &value, &e)))
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
