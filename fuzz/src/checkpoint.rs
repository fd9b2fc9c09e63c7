//! Targets of checkpoints: the headers of model files, and the JSON beside them.

use std::cell::OnceCell;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use expert_store::StoreError;
use expert_store::checkpoint::{Checkpoint, OpenOptions, open_with};
use tempfile::TempDir;

use super::store::{check_layer, fixture};

/// Largest file that an input is stretched to. Nothing reads the hole.
const STRETCHED_MAX_BYTES: u64 = 1 << 40;
/// Largest file that is handed to the reference reader, which wants it in memory.
const REFERENCE_MAX_BYTES: u64 = 256 << 10;
/// Room for tensors behind a GGUF header.
const GGUF_HOLE_BYTES: u64 = 1 << 20;

/// A safetensors file: once as it is, once with its header's length put right and as much data
/// behind it as it asks for. What is accepted, the format's own reader accepts, too.
pub fn safetensors(input: &[u8]) {
    with_place(|place| {
        let path = place.join("model.safetensors");
        safetensors_file(place, &path, input, input.len() as u64);
        let Some((announced, rest)) = input.split_first_chunk::<8>() else {
            return;
        };
        let announced = usize::try_from(u64::from_le_bytes(*announced)).unwrap_or(usize::MAX);
        let text = &rest[..announced.min(rest.len())];
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(text);
        let bytes = (file.len() as u64).saturating_add(data_bytes(text));
        if bytes <= STRETCHED_MAX_BYTES {
            safetensors_file(place, &path, &file, bytes);
        }
    });
}

fn safetensors_file(place: &Path, path: &Path, start: &[u8], bytes: u64) {
    write_stretched(path, start, bytes);
    let sound = match open(place) {
        Ok(checkpoint) => {
            check(&checkpoint);
            true
        }
        Err(StoreError::NoExperts { .. }) => true,
        Err(error) => {
            drop(error.to_string());
            false
        }
    };
    if sound && bytes <= REFERENCE_MAX_BYTES {
        let mut whole = start.to_vec();
        whole.resize(bytes as usize, 0);
        if let Err(why) = safetensors::SafeTensors::deserialize(&whole) {
            panic!("accepted, but the reference reader says: {why}");
        }
    }
}

/// Where the data of a header end, as far as that can be told.
fn data_bytes(header: &[u8]) -> u64 {
    let Ok(serde_json::Value::Object(tensors)) = serde_json::from_slice(header) else {
        return 0;
    };
    let end = |tensor: &serde_json::Value| tensor.get("data_offsets")?.get(1)?.as_u64();
    tensors.values().filter_map(end).max().unwrap_or(0)
}

/// A GGUF file: once as it is, once with room behind its header.
pub fn gguf(input: &[u8]) {
    with_place(|place| {
        let path = place.join("model.gguf");
        for hole_bytes in [0, GGUF_HOLE_BYTES] {
            write_stretched(&path, input, input.len() as u64 + hole_bytes);
            match open(place) {
                Ok(checkpoint) => check(&checkpoint),
                Err(error) => drop(error.to_string()),
            }
        }
    });
}

/// `config.json` beside sound files: it may say what it likes, the experts are those of the tensors.
///
/// Only a number of zero experts, which have no tensors, may be refused. DBRX, whose flattened
/// tensors do not tell how many experts they hold, may be anything that is sound.
pub fn config(input: &[u8]) {
    with_models(|models| {
        for (model, trusted) in [(&models.plain, false), (&models.flattened, true)] {
            fs::write(model.join("config.json"), input).expect("writing config.json");
            match open(model) {
                Ok(checkpoint) if trusted => check(&checkpoint),
                Ok(checkpoint) => assert_eq!(layers(&checkpoint), models.layers),
                Err(error) => assert!(
                    trusted || contains(input, b"zero_expert_num"),
                    "refused for its config.json: {error}"
                ),
            }
        }
    });
}

/// The list of a checkpoint's files: what is accepted names files of its own folder alone.
pub fn index(input: &[u8]) {
    with_models(|models| {
        let dir = &models.sharded;
        fs::write(dir.join("model.safetensors.index.json"), input).expect("writing the index");
        match open(dir) {
            Ok(checkpoint) => {
                check(&checkpoint);
                for file in &checkpoint.files {
                    assert!(!file.name.contains(['/', '\0']), "{:?}", file.name);
                }
            }
            Err(error) => drop(error.to_string()),
        }
    });
}

/// Model layers with their experts, in order.
type Layers = Vec<(u32, u32)>;

fn layers(checkpoint: &Checkpoint) -> Layers {
    let stacks = checkpoint.stacks.iter();
    let mut layers: Layers = stacks
        .flat_map(|s| &s.layers)
        .map(|l| (l.model_layer, l.num_experts))
        .collect();
    layers.sort_unstable();
    layers
}

/// Holds a checkpoint that was accepted against what `Checkpoint` promises.
fn check(checkpoint: &Checkpoint) {
    assert!(!checkpoint.stacks.is_empty());
    for stack in &checkpoint.stacks {
        assert!(stack.layers.windows(2).all(|w| w[0].layer < w[1].layer));
        for layer in &stack.layers {
            check_layer(layer);
            let count = layer.experts.len();
            for position in (0..count).filter(|&p| p < 8 || p + 8 >= count) {
                layer.for_each_segment(position, |s| {
                    let file = &checkpoint.files[s.file as usize];
                    let end = s.file_offset.checked_add(s.bytes);
                    let inside = end.is_some_and(|end| end <= file.stamp.bytes);
                    assert!(inside, "{s:?} of {} bytes", file.stamp.bytes);
                });
            }
        }
    }
}

fn open(path: &Path) -> Result<Checkpoint, StoreError> {
    open_with(path, &OpenOptions { threads: 1 })
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|w| w == part)
}

fn write_stretched(path: &Path, start: &[u8], bytes: u64) {
    let mut file = File::create(path).expect("creating the file under test");
    file.write_all(start)
        .and_then(|()| file.set_len(bytes))
        .expect("writing the file under test");
}

/// A directory of its own, in memory where the machine has such a place: a target writes its input
/// to a file thousands of times in a second.
pub(super) fn work_dir() -> TempDir {
    tempfile::Builder::new()
        .prefix("atlas-fuzz-")
        .tempdir()
        .expect("a directory for temporary files")
}

fn with_place(f: impl FnOnce(&Path)) {
    thread_local! {
        static PLACE: OnceCell<TempDir> = const { OnceCell::new() };
    }
    PLACE.with(|cell| f(cell.get_or_init(work_dir).path()));
}

/// Copies of fixtures without the file under test.
struct Models {
    plain: PathBuf,
    /// What is in `plain` without a `config.json`.
    layers: Layers,
    flattened: PathBuf,
    sharded: PathBuf,
    _dir: TempDir,
}

impl Models {
    fn copy() -> Self {
        let dir = work_dir();
        let copy = |name: &str, without: &str| {
            let to = dir.path().join(name);
            fs::create_dir_all(&to).expect("a folder for a copy");
            for entry in fs::read_dir(fixture(name)).expect("a fixture") {
                let from = entry.expect("an entry").path();
                let file = from.file_name().expect("a name");
                if file != without {
                    fs::copy(&from, to.join(file)).expect("copying a fixture");
                }
            }
            to
        };
        let plain = copy("deepseek-v3-fp8-mtp", "config.json");
        let found = open(&plain).expect("a fixture that needs no config.json");
        Self {
            layers: layers(&found),
            plain,
            flattened: copy("dbrx", "config.json"),
            sharded: copy("saved-qwen3moe", "model.safetensors.index.json"),
            _dir: dir,
        }
    }
}

fn with_models(f: impl FnOnce(&Models)) {
    thread_local! {
        static MODELS: OnceCell<Models> = const { OnceCell::new() };
    }
    MODELS.with(|cell| f(cell.get_or_init(Models::copy)));
}
