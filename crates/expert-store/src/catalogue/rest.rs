//! What a part of a layer knows of the records that it does not hold: their identities. With them it
//! can prove which whole it belongs to, alone, without the other parts.

use super::Layer;

/// Records of a layer that are held elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rest {
    /// Their experts, ascending.
    pub experts: Vec<u32>,
    /// Identity of each (`record_id` of `docs/store.md`).
    pub record_ids: Vec<u128>,
    /// Largest record image among them, bytes; no id covers it.
    pub image_bytes_max: u64,
}

impl Layer {
    /// The records that the model's layer has beside those held here; `None` where that is not known.
    pub fn rest(&self) -> Option<&Rest> {
        self.rest.as_ref()
    }

    /// Says which records the model's layer has beside those held here.
    ///
    /// *Errors*: text for people where they do not ascend, are not below the layer's number of
    /// experts, or are held here.
    pub fn set_rest(&mut self, rest: Option<Rest>) -> Result<(), String> {
        if let Some(rest) = &rest {
            let ascend = rest.experts.windows(2).all(|w| w[0] < w[1]);
            let is_foreign =
                |&e: &u32| e < self.num_experts && self.experts.binary_search(&e).is_err();
            if rest.record_ids.len() != rest.experts.len()
                || !ascend
                || !rest.experts.iter().all(is_foreign)
            {
                return Err(
                    "the records that are not held do not ascend, or are held after all".into(),
                );
            }
        }
        self.rest = rest;
        Ok(())
    }

    /// Identity of the layer, those of its records that are not held included; `None` where there
    /// are no checksums. A layer that knows of no others is all there is.
    pub fn whole_id(&self) -> Option<u128> {
        self.checksums.as_ref()?;
        let Some(rest) = &self.rest else {
            return Some(self.id(true));
        };
        let own = self.experts.iter().copied().zip(self.record_ids(true));
        let others = rest
            .experts
            .iter()
            .copied()
            .zip(rest.record_ids.iter().copied());
        let mut all: Vec<(u32, u128)> = own.chain(others).collect();
        all.sort_unstable_by_key(|&(expert, _)| expert);
        Some(self.id_over(all.into_iter()))
    }

    /// What is not held once only the experts `keep` are; `None` where the layer has no checksums.
    pub(crate) fn rest_without(&self, keep: &[u32]) -> Option<Rest> {
        self.checksums.as_ref()?;
        let mut rest = self.rest.clone().unwrap_or_default();
        let mut all: Vec<(u32, u128)> = rest
            .experts
            .drain(..)
            .zip(rest.record_ids.drain(..))
            .collect();
        for (position, (&expert, id)) in self.experts.iter().zip(self.record_ids(true)).enumerate()
        {
            if keep.binary_search(&expert).is_err() {
                all.push((expert, id));
                rest.image_bytes_max = rest.image_bytes_max.max(self.class(position).image_bytes);
            }
        }
        all.sort_unstable_by_key(|&(expert, _)| expert);
        (rest.experts, rest.record_ids) = all.into_iter().unzip();
        Some(rest)
    }
}
