use expert_store::catalogue::{Class, Leaf, Role, StackClass, Stacking, Transform};
use expert_store::info::{StoreInfo, StoreKind};
use expert_store::{Container, Dtype};

use super::*;

const HIDDEN: usize = 24;
const INTER: usize = 10;
const SPEC: Spec = Spec {
    tokens: 5,
    top_k: 2,
    seed: 7,
};

/// Experts made up in memory: two layers with some of 9 experts each.
struct MadeUp {
    class: Class,
    images: Vec<((u32, u32), Vec<u8>)>,
    held: Vec<Vec<u32>>,
}

impl MadeUp {
    fn new() -> Self {
        let dtype = Dtype::from_name("F32").unwrap();
        let leaf = |role: Role, shape: [usize; 2]| Leaf {
            role,
            leaf: "weight".into(),
            name: format!("{role:?}"),
            stacking: Stacking::Stacked,
            dtype,
            shape: shape.map(|n| n as u64).to_vec(),
            source_dim0: 9,
            image_offset: 0,
            bytes: (shape[0] * shape[1] * 4) as u64,
            transform: Transform::None,
        };
        let class = Class::layout(vec![
            leaf(Role::Gate, [INTER, HIDDEN]),
            leaf(Role::Up, [INTER, HIDDEN]),
            leaf(Role::Down, [HIDDEN, INTER]),
        ])
        .unwrap();
        let mut images = Vec::new();
        for layer in 0..2 {
            for expert in 0..9 {
                let mut random = Random::new(1, [layer, expert, 0]);
                // What is not weights is poison.
                let mut image = vec![0xff; class.image_bytes as usize];
                for leaf in &class.leaves {
                    let start = leaf.image_offset as usize;
                    for at in (start..start + leaf.bytes as usize).step_by(4) {
                        image[at..at + 4].copy_from_slice(&random.unit().to_le_bytes());
                    }
                }
                images.push(((layer, expert), image));
            }
        }
        Self {
            class,
            images,
            held: Vec::new(),
        }
    }

    fn image(&self, key: Key) -> &[u8] {
        let all = &self.images;
        let found = all.iter().find(|(k, _)| *k == (key.layer, key.expert));
        &found.unwrap().1
    }

    fn set(&mut self, layer: u32, expert: u32, at: usize, value: f32) {
        let index = (layer * 9 + expert) as usize;
        self.images[index].1[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// A row of a matrix, found again without the block's views.
    fn row(&self, key: Key, role: Role, row: usize) -> Vec<f64> {
        let leaf = self.class.leaves.iter().find(|l| l.role == role).unwrap();
        let columns = leaf.shape[1] as usize;
        let start = leaf.image_offset as usize + row * columns * 4;
        self.image(key)[start..start + columns * 4]
            .chunks(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
            .collect()
    }
}

impl Experts for &mut MadeUp {
    fn info(&self) -> StoreInfo {
        let layer = |layer| LayerInfo {
            layer,
            model_layer: layer,
            num_experts: 9,
            identity_experts: 0,
            experts: vec![[0, 3], [5, 9]],
            image_bytes_max: self.class.image_bytes,
            id: String::new(),
        };
        StoreInfo {
            kind: StoreKind::InPlace,
            stack: "layers".into(),
            class: StackClass::Trunk,
            container: Container::Safetensors,
            generation: 1,
            content_id: None,
            whole: None,
            layout_id: String::new(),
            layers: vec![layer(0), layer(1)],
        }
    }

    fn class(&self, _: Key) -> Result<Class, MoeError> {
        Ok(self.class.clone())
    }

    fn hold(
        &mut self,
        layer: u32,
        experts: &[u32],
        work: &mut dyn FnMut(&[Expert<'_>]) -> Result<(), MoeError>,
    ) -> Result<(), MoeError> {
        self.held.push(experts.to_vec());
        let experts = experts.iter().map(|&e| Key::new(layer, e));
        let held: Vec<Expert<'_>> = experts
            .map(|key| Expert {
                key,
                class: &self.class,
                image: self.image(key),
            })
            .collect();
        work(&held)
    }
}

fn run(experts: &mut MadeUp, spec: Spec, steps: u32) -> Result<u128, MoeError> {
    let mut forward = Forward::new(experts, spec)?;
    for _ in 0..steps {
        forward.step()?;
    }
    Ok(forward.hash())
}

/// One layer of the block in double precision and the plainest order.
fn plain_layer(experts: &MadeUp, layer: u32, state: &mut [Vec<f64>]) {
    let numbers = |purpose| {
        let mut out = vec![0.0; HIDDEN];
        Random::new(SPEC.seed, purpose).fill(&mut out);
        out.into_iter().map(f64::from).collect::<Vec<f64>>()
    };
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for row in state.iter_mut() {
        let size = (product(row, row) / HIDDEN as f64).sqrt();
        let norm = numbers([NORM, layer, 0]);
        let x: Vec<f64> = row
            .iter()
            .zip(&norm)
            .map(|(v, n)| v / size * (1.0 + 0.1 * n))
            .collect();
        let mut logits: Vec<(f64, u32)> = [0, 1, 2, 5, 6, 7, 8]
            .map(|e| {
                let router = numbers([ROUTER, layer, e]);
                (product(&router, &x) / (HIDDEN as f64).sqrt(), e)
            })
            .to_vec();
        logits.sort_by(|a, b| b.0.total_cmp(&a.0));
        logits.truncate(SPEC.top_k);
        let sum: f64 = logits.iter().map(|l| l.0.exp()).sum();
        for (logit, expert) in logits {
            let key = Key::new(layer, expert);
            let inner: Vec<f64> = (0..INTER)
                .map(|i| {
                    let gate = product(&experts.row(key, Role::Gate, i), &x);
                    gate / (1.0 + (-gate).exp()) * product(&experts.row(key, Role::Up, i), &x)
                })
                .collect();
            for (i, v) in row.iter_mut().enumerate() {
                *v += logit.exp() / sum * product(&experts.row(key, Role::Down, i), &inner);
            }
        }
    }
}

#[test]
fn states_are_those_of_a_plain_computation_in_double_precision() {
    let mut experts = MadeUp::new();
    let mut forward = Forward::new(&mut experts, SPEC).unwrap();
    forward.step().unwrap();
    let got = forward.state.clone();
    let uses = forward.uses().to_vec();
    assert!(uses.iter().all(|used| used.experts.len() > SPEC.top_k));

    let mut embedding = Random::new(SPEC.seed, [EMBEDDING, 0, 0]);
    let mut want: Vec<Vec<f64>> = (0..SPEC.tokens)
        .map(|_| (0..HIDDEN).map(|_| embedding.unit().into()).collect())
        .collect();
    for layer in 0..2 {
        plain_layer(&experts, layer, &mut want);
    }
    for (got, want) in got.iter().zip(want.iter().flatten()) {
        assert!((f64::from(*got) - want).abs() < 1e-3, "{got} {want}");
    }
}

#[test]
fn hash_tells_a_run_from_any_other() {
    let base = run(&mut MadeUp::new(), SPEC, 2).unwrap();
    assert_eq!(run(&mut MadeUp::new(), SPEC, 2).unwrap(), base);
    let mut others = vec![run(&mut MadeUp::new(), SPEC, 3).unwrap()];
    for spec in [
        Spec { seed: 8, ..SPEC },
        Spec { tokens: 4, ..SPEC },
        Spec { top_k: 3, ..SPEC },
    ] {
        others.push(run(&mut MadeUp::new(), spec, 2).unwrap());
    }
    assert!(others.iter().all(|other| *other != base));
}

#[test]
fn each_weight_of_an_expert_that_is_used_counts() {
    let base = run(&mut MadeUp::new(), SPEC, 1).unwrap();
    let used = {
        let mut experts = MadeUp::new();
        run(&mut experts, SPEC, 1).unwrap();
        experts.held[1][0]
    };
    let class = MadeUp::new().class;
    for leaf in &class.leaves {
        let mut experts = MadeUp::new();
        experts.set(1, used, leaf.image_offset as usize, 1.5);
        assert_ne!(run(&mut experts, SPEC, 1).unwrap(), base, "{}", leaf.name);
    }
    let mut experts = MadeUp::new();
    // Not held, so never used.
    experts.set(1, 4, 0, 1.5);
    assert_eq!(run(&mut experts, SPEC, 1).unwrap(), base);
}

#[test]
fn one_poisoned_weight_is_an_error_that_says_where() {
    let mut experts = MadeUp::new();
    run(&mut experts, SPEC, 1).unwrap();
    let used = experts.held[1][0];
    experts.set(1, used, 0, f32::from_bits(u32::MAX));
    let error = run(&mut experts, SPEC, 1).unwrap_err();
    let MoeError::NotFinite { step, layer, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((step, layer), (0, 1));
}

#[test]
fn all_experts_are_used_where_a_layer_has_fewer_than_were_asked_for() {
    let mut experts = MadeUp::new();
    let spec = Spec { top_k: 100, ..SPEC };
    run(&mut experts, spec, 1).unwrap();
    assert_eq!(experts.held, [[0, 1, 2, 5, 6, 7, 8], [0, 1, 2, 5, 6, 7, 8]]);
}

#[test]
fn counts_that_cannot_be_are_refused() {
    for spec in [
        Spec { tokens: 0, ..SPEC },
        Spec { top_k: 0, ..SPEC },
        Spec {
            tokens: TOKENS_MAX + 1,
            ..SPEC
        },
    ] {
        let error = run(&mut MadeUp::new(), spec, 1).unwrap_err();
        assert!(matches!(error, MoeError::Spec(_)), "{error}");
    }
}
