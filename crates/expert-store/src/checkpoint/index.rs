//! `model.safetensors.index.json`: which file holds which tensor.
//!
//! Names are kept as hashes, per file: a large index has half a million of them and they are only
//! compared with what the headers hold.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::{Component, Path};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use xxhash_rust::xxh3::xxh3_128;

use super::{TextKey, read_bounded};
use crate::StoreError;

/// Largest index file, bytes: four times that of the largest known checkpoint.
const INDEX_MAX_BYTES: u64 = 256 << 20;

/// A read and checked index.
#[derive(Debug)]
pub(crate) struct Index {
    /// File names, in bytewise order.
    pub(crate) files: Vec<String>,
    /// Per file, hashes of the names it must hold, ascending.
    pub(crate) names: Vec<Vec<u128>>,
}

impl Index {
    /// Reads the index at `path`.
    ///
    /// *Errors*: it cannot be read, names a file outside its folder, or lists a tensor twice.
    pub(crate) fn read(path: &Path) -> Result<Self, StoreError> {
        let mut files: HashMap<String, usize> = HashMap::new();
        let mut names: Vec<Vec<u128>> = Vec::new();
        let mut last = (String::new(), usize::MAX);
        each_entry(path, |name, file| {
            if last.1 == usize::MAX || last.0 != file {
                let i = match files.get(file) {
                    Some(&i) => i,
                    None => {
                        confine(file)?;
                        files.insert(file.to_owned(), names.len());
                        names.push(Vec::new());
                        names.len() - 1
                    }
                };
                last = (file.to_owned(), i);
            }
            names[last.1].push(xxh3_128(name.as_bytes()));
            Ok(())
        })?;
        if files.is_empty() {
            return Err(StoreError::checkpoint(path, "the index lists no tensors"));
        }
        let mut sorted: Vec<(String, usize)> = files.into_iter().collect();
        sorted.sort_unstable();
        let mut this = Self {
            files: Vec::new(),
            names: Vec::new(),
        };
        for (file, i) in sorted {
            let mut hashes = std::mem::take(&mut names[i]);
            hashes.sort_unstable();
            this.files.push(file);
            this.names.push(hashes);
        }
        if let Some((hash, ..)) = first_repeat(&this.names) {
            let name = name_of(path, hash);
            return Err(StoreError::checkpoint(
                path,
                format!("the index lists tensor {name:?} twice; a tensor has one file"),
            ));
        }
        Ok(this)
    }

    /// Whether each listed name is in its file.
    ///
    /// *Errors*: names the first that is not, and its file.
    pub(crate) fn check_listed(&self, path: &Path, found: &[Vec<u128>]) -> Result<(), StoreError> {
        for ((file, listed), found) in self.files.iter().zip(&self.names).zip(found) {
            let mut found = found.iter();
            for hash in listed {
                // Both ascend, so one pass over `found` serves the whole file.
                if !found.by_ref().any(|f| f == hash) {
                    let name = name_of(path, *hash);
                    return Err(StoreError::checkpoint(
                        path,
                        format!(
                            "the index lists tensor {name:?} in {file}, which does not hold it; \
                             download index and files of one revision"
                        ),
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The first hash that is there twice, in files `a` and `b` of the lists.
pub(crate) fn first_repeat(lists: &[Vec<u128>]) -> Option<(u128, usize, usize)> {
    let mut all: Vec<u128> = lists.iter().flatten().copied().collect();
    all.sort_unstable();
    let hash = all.windows(2).find(|w| w[0] == w[1])?[0];
    let mut holders = lists.iter().enumerate().flat_map(|(i, list)| {
        let n = list.partition_point(|h| *h <= hash) - list.partition_point(|h| *h < hash);
        std::iter::repeat_n(i, n)
    });
    Some((hash, holders.next()?, holders.next()?))
}

/// The listed name with that hash; for messages.
fn name_of(path: &Path, hash: u128) -> String {
    let mut found = String::new();
    let _ = each_entry(path, |name, _| {
        if xxh3_128(name.as_bytes()) == hash {
            name.clone_into(&mut found);
        }
        Ok(())
    });
    found
}

/// Refuses names that leave the folder or cannot be shown; links are followed by whoever opens them.
pub(crate) fn confine(file: &str) -> Result<(), String> {
    let inside = !file.is_empty()
        && Path::new(file)
            .components()
            .all(|c| matches!(c, Component::Normal(_)));
    if !inside {
        return Err(format!(
            "the index names file {file:?}, which is not inside the checkpoint's folder"
        ));
    }
    if file.chars().any(char::is_control) || file.len() > 1024 {
        return Err(format!(
            "the index names file {file:?}: control characters, or longer than 1024 bytes"
        ));
    }
    Ok(())
}

fn each_entry(
    path: &Path,
    mut each: impl FnMut(&str, &str) -> Result<(), String>,
) -> Result<(), StoreError> {
    let text = read_bounded(path, INDEX_MAX_BYTES)?;
    if text.starts_with(super::safetensors::LFS_MAGIC) {
        return Err(StoreError::checkpoint(
            path,
            super::safetensors::lfs_pointer(),
        ));
    }
    let mut json = serde_json::Deserializer::from_slice(&text);
    Document(&mut each)
        .deserialize(&mut json)
        .and_then(|()| json.end())
        .map_err(|e| StoreError::checkpoint(path, format!("the index cannot be read: {e}")))
}

struct Document<'f, F>(&'f mut F);
struct WeightMap<'f, F>(&'f mut F);

impl<'de, F: FnMut(&str, &str) -> Result<(), String>> DeserializeSeed<'de> for Document<'_, F> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de, F: FnMut(&str, &str) -> Result<(), String>> Visitor<'de> for Document<'_, F> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = false;
        while let Some(TextKey(key)) = map.next_key::<TextKey<'de>>()? {
            if key == "weight_map" {
                if std::mem::replace(&mut seen, true) {
                    return Err(serde::de::Error::custom("weight_map is there twice"));
                }
                map.next_value_seed(WeightMap(&mut *self.0))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if seen {
            Ok(())
        } else {
            Err(serde::de::Error::custom("there is no weight_map"))
        }
    }
}

impl<'de, F: FnMut(&str, &str) -> Result<(), String>> DeserializeSeed<'de> for WeightMap<'_, F> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de, F: FnMut(&str, &str) -> Result<(), String>> Visitor<'de> for WeightMap<'_, F> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensor names to file names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((TextKey(name), TextKey(file))) =
            map.next_entry::<TextKey<'de>, TextKey<'de>>()?
        {
            let (name, file): (Cow<'de, str>, Cow<'de, str>) = (name, file);
            (self.0)(&name, &file).map_err(serde::de::Error::custom)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "tests/index.rs"]
mod tests;
