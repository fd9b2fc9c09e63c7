//! The pitfalls of the layouts: what is missing, unequal, ambiguous or only said by the configuration.

use crate::catalogue::{Class, Role, Stacking};
use crate::checkpoint::tests::{
    Folder, T, experts, leaf as of, leaves, one_file, one_file_of, only_layer, refusal,
};
use crate::checkpoint::{Checkpoint, OpenOptions, open_with};

use Role::{Gate, GateUp, Other};
use Stacking::{PerExpert, Stacked};

const P: &str = "model.layers.0.mlp.experts.";

#[test]
fn missing_expert_is_named() {
    for missing in ["0.up_proj", "1.gate_proj", "2.down_proj"] {
        let mut t = experts("model.layers.3.mlp", 3);
        let name = format!("model.layers.3.mlp.experts.{missing}.weight");
        t.retain(|(n, ..)| *n != name);
        let why = one_file_of(&t, "").refusal();
        assert!(why.contains(&format!("{name:?} is missing")), "{why}");
    }
    let far: [T<'_>; 1] = [("layers.0.experts.65534.w1.weight", "U8", &[1])];
    refusal(
        &far,
        "",
        "experts.0.w1.weight\" is missing (expert 0 of 65535)",
    );
    let scale: [T<'_>; 1] = [("layers.0.experts.0.w1.weight_scale", "U8", &[1])];
    refusal(&scale, "", "their weights are missing");
}

#[test]
fn unequal_experts_fall_into_shape_classes() {
    // P7: an input scale that calibration never saw; P6: text and vision experts; GPTQ with one left as it was.
    let mut t = experts("model.layers.3.mlp", 4);
    for e in [0, 1, 3] {
        t.push((
            format!("model.layers.3.mlp.experts.{e}.up_proj.input_scale"),
            "F32",
            vec![],
        ));
    }
    let c = one_file_of(&t, "").open().unwrap();
    let l = &c.stacks[0].layers[0];
    assert_eq!(l.class_of, [0, 0, 1, 0]);
    assert_eq!(
        (l.classes[0].leaves.len(), l.classes[1].leaves.len()),
        (4, 3)
    );
    let mut seen = Vec::new();
    l.for_each_segment(2, |s| seen.push(s.bytes));
    assert_eq!(seen.iter().sum::<u64>(), 3 * 64);

    let mut t = experts("model.layers.3.mlp", 2);
    for e in 2..4 {
        for (p, s) in [
            ("gate_proj", [2, 8]),
            ("up_proj", [2, 8]),
            ("down_proj", [8, 2]),
        ] {
            t.push((
                format!("model.layers.3.mlp.experts.{e}.{p}.weight"),
                "BF16",
                s.to_vec(),
            ));
        }
    }
    let l = one_file_of(&t, "").open().unwrap().stacks[0].layers[0].clone();
    assert_eq!(
        (l.class_of.clone(), l.classes[1].image_bytes),
        (vec![0, 0, 1, 1], 768)
    );
    assert_eq!(leaves(&l, 1)[0], of(Gate, "weight", PerExpert, &[2, 8], 0));

    let t: Vec<(String, &str, Vec<u64>)> = (0..3)
        .flat_map(|e| match e {
            1 => vec![(format!("{P}{e}.w1.weight"), "BF16", vec![4, 8])],
            _ => vec![
                (format!("{P}{e}.w1.qweight"), "I32", vec![1, 4]),
                (format!("{P}{e}.w1.scales"), "F16", vec![1, 4]),
            ],
        })
        .collect();
    let l = one_file_of(&t, "").open().unwrap().stacks[0].layers[0].clone();
    assert_eq!(l.class_of, [0, 1, 0]);

    let many: Vec<(String, &str, Vec<u64>)> = (0..257)
        .map(|e| (format!("{P}{e}.w1.weight"), "U8", vec![e + 1]))
        .collect();
    assert!(
        one_file_of(&many, "")
            .refusal()
            .contains("more than 256 different shapes")
    );
    assert_eq!(
        one_file_of(&many[..256], "").open().unwrap().stacks[0].layers[0]
            .classes
            .len(),
        256
    );
}

#[test]
fn stacked_weights_may_disagree_in_their_number_of_experts() {
    let t: [T<'_>; 4] = [
        (
            "model.layers.0.mlp.experts.gate_up_proj",
            "BF16",
            &[5, 8, 6],
        ),
        ("model.layers.0.mlp.experts.down_proj", "BF16", &[3, 6, 4]),
        ("model.layers.0.mlp.experts.down_proj_scale", "F32", &[3]),
        ("model.layers.0.mlp.experts.gate_up_proj_scale", "F32", &[5]),
    ];
    let c = one_file(&t, r#"{"n_routed_experts":3,"zero_expert_num":2}"#)
        .open()
        .unwrap();
    let l = &c.stacks[0].layers[0];
    assert_eq!((l.num_experts, l.identity_experts), (5, 0));
    assert_eq!(l.class_of, [0, 0, 0, 1, 1]);
    assert_eq!(
        leaves(l, 1),
        [
            of(GateUp, "scale", Stacked, &[], 5),
            of(GateUp, "weight", Stacked, &[8, 6], 5)
        ]
    );
    assert!(
        c.warnings
            .iter()
            .any(|w| w.contains("down_proj has 3 of 5")),
        "{:?}",
        c.warnings
    );
}

#[test]
fn configuration_is_a_cross_check_and_tells_zero_experts() {
    let t = experts("model.layers.0.mlp", 4);
    let c = one_file_of(
        &t,
        r#"{"n_routed_experts":4,"zero_expert_num":2,"moe_topk":3}"#,
    )
    .open()
    .unwrap();
    let l = &c.stacks[0].layers[0];
    assert_eq!((l.num_experts, l.identity_experts), (4, 2));
    assert!(c.warnings.is_empty());
    let warned = |config: &str, want: &str| {
        let c = one_file_of(&t, config).open().unwrap();
        assert_eq!(c.stacks[0].layers[0].num_experts, 4);
        assert!(
            c.warnings.iter().any(|w| w.contains(want)),
            "{:?}",
            c.warnings
        );
    };
    warned(r#"{"num_experts":8}"#, "layer 0 has 4, config.json says 8");
    warned(
        r#"{"num_experts":[8,3]}"#,
        "layer 0 has 4, config.json says 8",
    );
    warned(r#"{"num_experts_per_tok":6}"#, "says 6 experts per token");
    warned("{", "config.json was not used");
    warned(
        r#"{"num_experts":18446744073709551615,"zero_expert_num":7}"#,
        "layer 0 has 4",
    );
    warned(
        r#"{"num_experts":[18446744073709551615,18446744073709551615]}"#,
        "layer 0 has 4",
    );
    let quiet = |config: &str| {
        assert!(
            one_file_of(&t, config).open().unwrap().warnings.is_empty(),
            "{config}"
        );
    };
    quiet(r#"{"num_experts":null,"num_local_experts":4}"#);
    quiet(r#"{"moe_num_experts":[2,2]}"#);
    quiet(r#"{"num_experts":[4]}"#);
    quiet("");
}

#[test]
fn what_cannot_be_told_apart_is_refused() {
    refusal(
        &[("model.layers.0.mlp.experts.gate_up_proj", "U8", &[96, 1])],
        "",
        "cannot be told apart",
    );
    refusal(
        &[("model.layers.0.mlp.experts.gate_up_proj", "F4", &[2, 3, 1])],
        "",
        "not whole bytes",
    );
    refusal(
        &[(
            "model.layers.0.mlp.experts.gate_up_proj",
            "U8",
            &[65_536, 1, 1],
        )],
        "",
        "65536 experts, the limit is 65535",
    );
    refusal(
        &[("model.layers.0.experts.1.w1.{}", "U8", &[1])],
        "",
        "'{}' in its name",
    );
    let mut both = experts("model.layers.0.mlp", 2);
    both.push((
        "model.layers.0.mlp.experts.gate_up_proj".into(),
        "BF16",
        vec![2, 8, 6],
    ));
    assert!(
        one_file_of(&both, "")
            .refusal()
            .contains("both one by one and stacked")
    );
    let mut both = experts("model.layers.0.mlp", 2);
    both.extend(experts("model.layers.0.self_attn", 2));
    assert!(
        one_file_of(&both, "")
            .refusal()
            .contains("experts in two places")
    );
}

#[test]
fn layers_without_experts_leave_nothing_or_say_so() {
    // Granite's names in a dense layer; empty stacks; one expert.
    let none = |t: &[T<'_>], want: &str| {
        let f = one_file(t, r#"{"num_local_experts":0}"#);
        assert!(matches!(f.open(), Err(crate::StoreError::NoExperts { .. })));
        assert!(f.refusal().contains(want), "{}", f.refusal());
    };
    none(
        &[
            ("model.layers.0.mlp.input_linear.weight", "BF16", &[8, 6]),
            ("model.layers.0.mlp.output_linear.weight", "BF16", &[6, 4]),
        ],
        "dense",
    );
    none(
        &[(
            "model.layers.0.mlp.experts.gate_up_proj",
            "BF16",
            &[0, 8, 6],
        )],
        "no elements",
    );
    none(
        &[(
            "model.layers.0.mlp.experts.gate_up_proj",
            "BF16",
            &[4, 0, 6],
        )],
        "no elements",
    );
    none(
        &[(
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            "BF16",
            &[0, 6],
        )],
        "no elements",
    );
    none(&[], "no tensors");
    // Many experts of no bytes beside a scalar must not be worth memory.
    none(
        &[
            (
                "model.layers.0.mlp.experts.gate_up_proj",
                "U8",
                &[65_535, 0, 1],
            ),
            ("model.layers.0.mlp.experts.gate_up_proj_scale", "F32", &[]),
        ],
        "no elements",
    );
    let l = only_layer(
        &[(
            "model.layers.0.mlp.experts.gate_up_proj",
            "BF16",
            &[1, 8, 6],
        )],
        "",
    );
    assert_eq!(
        (l.num_experts, leaves(&l, 0)[0].clone()),
        (1, of(GateUp, "weight", Stacked, &[8, 6], 1))
    );
    // An empty layer beside a full one leaves no hole in the numbers.
    let mut t = experts("model.layers.5.mlp", 1);
    t.push((
        "model.layers.2.mlp.experts.gate_up_proj".into(),
        "BF16",
        vec![0, 8, 6],
    ));
    let c = one_file_of(&t, "").open().unwrap();
    assert_eq!(
        (
            c.stacks[0].layers[0].layer,
            c.stacks[0].layers[0].model_layer
        ),
        (0, 5)
    );
    assert_eq!(c.warnings.len(), 1);
}

#[test]
fn precision_may_differ_by_layer_and_number_of_experts_too() {
    let mut t = experts("model.layers.0.mlp", 4);
    for e in 0..2 {
        t.push((
            format!("model.layers.1.mlp.experts.{e}.gate_proj.weight"),
            "F8_E4M3",
            vec![4, 8],
        ));
        t.push((
            format!("model.layers.1.mlp.experts.{e}.gate_proj.weight_scale"),
            "F32",
            vec![],
        ));
    }
    let c = one_file_of(&t, r#"{"num_experts":[4,2]}"#).open().unwrap();
    let counts: Vec<u32> = c.stacks[0].layers.iter().map(|l| l.num_experts).collect();
    assert_eq!(counts, [4, 2]);
    assert!(c.warnings.is_empty(), "{:?}", c.warnings);
    assert_ne!(c.stacks[0].layers[0].classes, c.stacks[0].layers[1].classes);
}

#[test]
fn unknown_leaves_are_kept_and_unknown_modules_are_told() {
    let mut t = experts("model.layers.0.mlp", 2);
    t.push(("model.layers.0.mlp.experts.0.extra".into(), "U8", vec![3]));
    t.push(("model.layers.0.mlp.experts.1.extra".into(), "U8", vec![3]));
    t.push(("model.layers.0.mlp.experts.mystery".into(), "U8", vec![3]));
    let c = one_file_of(&t, "").open().unwrap();
    assert_eq!(
        leaves(&c.stacks[0].layers[0], 0)[3],
        of(Other, "extra", PerExpert, &[3], 0)
    );
    assert!(
        c.warnings[0].contains("experts.mystery"),
        "{:?}",
        c.warnings
    );
}

fn shape_of(c: &Checkpoint) -> Vec<Vec<Class>> {
    c.stacks[0]
        .layers
        .iter()
        .map(|l| l.classes.clone())
        .collect()
}

#[test]
fn order_of_tensors_shards_and_threads_does_not_matter() {
    let mut t = experts("model.layers.0.mlp", 12);
    t.extend(experts("model.layers.1.mlp", 12));
    let borrow = |t: &[(String, &'static str, Vec<u64>)], name: &str, f: Folder| {
        let b: Vec<T<'_>> = t
            .iter()
            .map(|(n, d, s)| (n.as_str(), *d, s.as_slice()))
            .collect();
        f.st(name, &b)
    };
    let one = borrow(&t, "m.safetensors", Folder::new());
    t.reverse();
    let (a, b) = t.split_at(31);
    let two = borrow(
        b,
        "b.safetensors",
        borrow(a, "a.safetensors", Folder::new()),
    );
    let want = shape_of(&one.open().unwrap());
    for threads in [1, 2, 5] {
        let c = open_with(two.path(), &OpenOptions { threads }).unwrap();
        assert_eq!(shape_of(&c), want);
        for l in &c.stacks[0].layers {
            // Each record's bytes are those of its own tensors.
            for e in 0..12 {
                let mut bytes = 0;
                l.for_each_segment(e, |s| bytes += s.bytes);
                assert_eq!(bytes, 3 * 64);
            }
        }
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 500, failure_persistence: None, ..Default::default() })]
    #[test]
    fn odd_mixtures_of_names_and_shapes_never_panic(
        picks in proptest::collection::vec((0usize..14, 0u64..4, proptest::collection::vec(0u64..5, 0..4), 0usize..5), 1..12),
        experts in 0u64..7,
    ) {
        let names = [
            "experts.#.w1.weight", "experts.#.w2.weight", "experts.#.w1.scale", "experts.gate_up_proj", "experts.down_proj",
            "experts.down_proj_scale", "experts.mlp.w1", "experts.mlp.w2", "experts.mlp.v1", "moe.gate_proj.weight",
            "experts.fc1.weight", "experts.fc2.weight", "switch_mlp.fc1.scales", "experts.#.extra",
        ];
        let types = ["U8", "BF16", "F32", "I8", "F8_E8M0"];
        let mut t: Vec<(String, &str, Vec<u64>)> = Vec::new();
        for (name, e, shape, dtype) in picks {
            let name = format!("layers.{}.{}", e % 2, names[name].replace('#', &e.to_string()));
            if t.iter().all(|x| x.0 != name) {
                t.push((name, types[dtype], shape));
            }
        }
        if let Ok(c) = one_file_of(&t, &format!("{{\"num_experts\":{experts}}}")).open() {
            let end = c.files[0].stamp.bytes;
            for layer in c.stacks.iter().flat_map(|s| &s.layers) {
                for position in 0..layer.experts.len() {
                    layer.for_each_segment(position, |s| assert!(s.file_offset + s.bytes <= end));
                }
            }
        }
    }
}
