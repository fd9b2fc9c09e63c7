//! `expert_store::Store` as a [`Source`].

use std::fs::File;
use std::path::Path;

use expert_store::codec::Sections;
use expert_store::{Piece, Store, StoreError};
use expert_wire::message::ErrorCode;
use expert_wire::{Key, v1};

use crate::{FilePiece, Source, SourceError};

impl Source for Store {
    fn generation(&self) -> u64 {
        self.generation()
    }

    fn content_id(&self) -> Option<u128> {
        self.content_id()
    }

    fn layout_id(&self) -> u128 {
        self.layout_id()
    }

    fn v1_manifest(&self) -> Option<&v1::Manifest> {
        self.v1_manifest()
    }

    fn info_json(&self) -> Result<Vec<u8>, SourceError> {
        serde_json::to_vec(self.info())
            .map_err(|e| SourceError::new(ErrorCode::Internal, e.to_string()))
    }

    fn layer_blob(&self, layer: u32, sections: u32) -> Result<Vec<u8>, SourceError> {
        self.layer_blob(layer, Sections::from_bits(sections))
            .ok_or_else(|| no_such_layer(layer))
    }

    fn file_count(&self) -> usize {
        self.files().len()
    }

    fn file(&self, index: u32) -> Option<&File> {
        self.files().get(index as usize).map(|f| &f.file)
    }

    fn file_path(&self, index: u32) -> Option<&Path> {
        self.files().get(index as usize).map(|f| f.path.as_path())
    }

    fn file_change(&self, index: u32) -> Option<String> {
        match self.files().get(index as usize) {
            Some(file) => file.changed_now(),
            None => Some("the store has no such file".into()),
        }
    }

    fn changed_files(&self) -> Vec<(usize, String)> {
        self.changed_files()
    }

    fn for_each_record(&self, f: &mut dyn FnMut(Key, u64)) {
        for layer in &self.catalogue().layers {
            for (position, &expert) in layer.experts.iter().enumerate() {
                let image_bytes = layer.class(position).image_bytes;
                f(Key::new(layer.layer, expert), image_bytes);
            }
        }
    }

    fn for_each_piece(
        &self,
        key: Key,
        offset: u64,
        bytes: u64,
        f: &mut dyn FnMut(FilePiece),
    ) -> Result<(), SourceError> {
        let mut pass = |piece| {
            f(match piece {
                Piece::Zeros { bytes } => FilePiece::Zeros { bytes },
                Piece::File {
                    file,
                    offset,
                    bytes,
                } => FilePiece::File {
                    file,
                    offset,
                    bytes,
                },
            });
        };
        self.for_each_piece(key, offset, bytes, &mut pass)
            .map_err(|e| {
                let code = match &e {
                    StoreError::NoSuchRecord { .. }
                        if self.catalogue().layer(key.layer).is_none() =>
                    {
                        ErrorCode::NoSuchLayer
                    }
                    StoreError::NoSuchRecord { .. } => ErrorCode::NoSuchExpert,
                    StoreError::IdentityExpert { .. } => ErrorCode::IdentityExpert,
                    StoreError::BadRange { .. } => ErrorCode::BadRange,
                    _ => ErrorCode::Internal,
                };
                SourceError::new(code, e.to_string())
            })
    }
}

fn no_such_layer(layer: u32) -> SourceError {
    SourceError::new(
        ErrorCode::NoSuchLayer,
        format!("this peer holds no layer {layer}"),
    )
}
