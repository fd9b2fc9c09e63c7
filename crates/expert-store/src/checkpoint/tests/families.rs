//! Families by names and shapes: which leaves a record gets and how its tensors hold the experts.

use crate::catalogue::{LeafSource, Role, Stacking};
use crate::checkpoint::tests::{T, leaf as of, leaves, one_file_of, only_layer, refusal, sources};

use Role::{Down, Gate, GateUp, Up};
use Stacking::{Common, Flattened, PerExpert, Stacked};

#[test]
fn per_expert_families_keep_all_their_leaves() {
    // Module, projections, leaves with element type and shape.
    type Family<'a> = (&'a str, &'a [&'a str], &'a [T<'a>]);
    let gud: &[&str] = &["gate_proj", "up_proj", "down_proj"];
    let w: &[&str] = &["w1", "w3", "w2"];
    let bf16: &[T<'_>] = &[("weight", "BF16", &[4, 8])];
    let fp8: &[T<'_>] = &[
        ("weight", "F8_E4M3", &[4, 8]),
        ("weight_scale_inv", "F32", &[1, 1]),
    ];
    let nvfp4: &[T<'_>] = &[
        ("weight", "U8", &[4, 16]),
        ("weight_scale", "F8_E4M3", &[4, 2]),
        ("weight_scale_2", "F32", &[]),
        ("input_scale", "F32", &[]),
    ];
    let int4: &[T<'_>] = &[
        ("weight_packed", "I32", &[4, 1]),
        ("weight_scale", "BF16", &[4, 1]),
        ("weight_shape", "I64", &[2]),
    ];
    let gptq: &[T<'_>] = &[
        ("qweight", "I32", &[1, 4]),
        ("qzeros", "I32", &[1, 1]),
        ("scales", "F16", &[1, 4]),
        ("g_idx", "I32", &[8]),
    ];
    let bnb: &[T<'_>] = &[
        ("weight", "U8", &[16, 1]),
        ("weight.absmax", "U8", &[1]),
        ("weight.quant_state.bitsandbytes__nf4", "U8", &[90]),
    ];
    let v4: &[T<'_>] = &[("weight", "I8", &[4, 4]), ("scale", "F8_E8M0", &[4, 1])];
    let exl3: &[T<'_>] = &[
        ("trellis", "I16", &[1, 1, 48]),
        ("suh", "F16", &[4]),
        ("svh", "F16", &[4]),
    ];
    let mistral: &[T<'_>] = &[
        ("weight", "F8_E4M3", &[4, 8]),
        ("qscale_weight", "F32", &[]),
        ("qscale_act", "F32", &[]),
    ];
    let families: &[Family<'_>] = &[
        ("model.layers.3.block_sparse_moe.experts", w, bf16),
        ("model.layers.3.mlp.experts", gud, bf16),
        ("mtp.layers.0.mlp.experts", gud, bf16),
        ("thinker.model.layers.3.mlp.experts", gud, bf16),
        ("model.layers.3.mlp.experts", gud, fp8),
        ("model.layers.3.mlp.experts", gud, nvfp4),
        ("language_model.model.layers.3.mlp.experts", gud, int4),
        (
            "language_model.model.layers.3.block_sparse_moe.experts",
            w,
            int4,
        ),
        ("model.layers.3.mlp.experts", gud, gptq),
        ("model.layers.3.mlp.experts", gud, bnb),
        ("layers.3.ffn.experts", w, v4),
        ("mtp.0.ffn.experts", w, v4),
        ("layers.3.experts", w, mistral),
        ("model.layers.3.mlp.experts", gud, exl3),
        ("model.layers.3.feed_forward.experts", gud, bf16),
        (
            "backbone.layers.3.mixer.experts",
            &["up_proj", "down_proj"],
            nvfp4,
        ),
        ("model.language_model.layers.3.experts", gud, bf16),
        (
            "transformer.decoder_layer.3.moe",
            &["linear", "linear_v", "linear_1"],
            bf16,
        ),
        (
            "vision_encoder.blocks.3.mlp.experts",
            &["fc1", "fc3", "fc2"],
            bf16,
        ),
    ];
    for (module, projections, list) in families {
        let mut tensors = vec![
            (format!("{module}.e_score_correction_bias"), "F32", vec![3]),
            (
                module.replace("experts", "shared_experts") + ".gate_proj.weight",
                "BF16",
                vec![4, 8],
            ),
        ];
        for e in 0..3 {
            for p in *projections {
                for (leaf, dtype, shape) in *list {
                    tensors.push((format!("{module}.{e}.{p}.{leaf}"), dtype, shape.to_vec()));
                }
            }
        }
        let c = one_file_of(&tensors, "").open().unwrap();
        assert_eq!(c.stacks.len(), 1, "{module}");
        let layer = &c.stacks[0].layers[0];
        assert_eq!((layer.num_experts, layer.classes.len()), (3, 1), "{module}");
        let mut names: Vec<&str> = list.iter().map(|l| l.0).collect();
        names.sort_unstable();
        let roles: &[Role] = match projections.len() {
            2 => &[Up, Down],
            _ => &[Gate, Up, Down],
        };
        let want: Vec<(Role, &str)> = roles
            .iter()
            .flat_map(|r| names.iter().map(|n| (*r, *n)))
            .collect();
        let got: Vec<(Role, &str)> = layer.classes[0]
            .leaves
            .iter()
            .map(|l| (l.role, &*l.leaf))
            .collect();
        assert_eq!(got, want, "{module}");
        assert!(
            layer.classes[0]
                .leaves
                .iter()
                .all(|l| l.stacking == PerExpert && l.name.contains(".{}."))
        );
    }
}

#[test]
fn stacked_families_are_sliced_along_the_expert() {
    // gpt-oss, MXFP4
    let l = only_layer(
        &[
            (
                "model.layers.0.mlp.experts.gate_up_proj_blocks",
                "U8",
                &[4, 6, 2, 16],
            ),
            (
                "model.layers.0.mlp.experts.gate_up_proj_scales",
                "U8",
                &[4, 6, 2],
            ),
            (
                "model.layers.0.mlp.experts.gate_up_proj_bias",
                "BF16",
                &[4, 6],
            ),
            (
                "model.layers.0.mlp.experts.down_proj_blocks",
                "U8",
                &[4, 6, 1, 16],
            ),
            (
                "model.layers.0.mlp.experts.down_proj_scales",
                "U8",
                &[4, 6, 1],
            ),
            ("model.layers.0.mlp.experts.down_proj_bias", "BF16", &[4, 6]),
            ("model.layers.0.mlp.router.weight", "BF16", &[4, 6]),
        ],
        "",
    );
    assert_eq!(
        leaves(&l, 0),
        [
            of(GateUp, "bias", Stacked, &[6], 4),
            of(GateUp, "blocks", Stacked, &[6, 2, 16], 4),
            of(GateUp, "scales", Stacked, &[6, 2], 4),
            of(Down, "bias", Stacked, &[6], 4),
            of(Down, "blocks", Stacked, &[6, 1, 16], 4),
            of(Down, "scales", Stacked, &[6, 1], 4),
        ]
    );
    assert!(matches!(
        sources(&l, 0)[1],
        LeafSource::Strided { step: 192, .. }
    ));
    // One by one again (unsloth): layout B.
    let l = only_layer(
        &[
            (
                "model.layers.0.mlp.experts.gate_up_projs.0.weight",
                "BF16",
                &[6, 4],
            ),
            (
                "model.layers.0.mlp.experts.gate_up_projs.1.weight",
                "BF16",
                &[6, 4],
            ),
            (
                "model.layers.0.mlp.experts.down_projs.0.weight",
                "BF16",
                &[4, 3],
            ),
            (
                "model.layers.0.mlp.experts.down_projs.1.weight",
                "BF16",
                &[4, 3],
            ),
        ],
        "",
    );
    assert_eq!(
        leaves(&l, 0),
        [
            of(GateUp, "weight", PerExpert, &[6, 4], 0),
            of(Down, "weight", PerExpert, &[4, 3], 0)
        ]
    );
    assert_eq!(
        l.classes[0].leaves[0].name,
        "model.layers.0.mlp.experts.gate_up_projs.{}.weight"
    );
    // Step: separate, under `moe`; Granite: under `block_sparse_moe`; MLX; Inkling; Aria; MLX Nemotron.
    let l = only_layer(
        &[
            ("model.layers.3.moe.gate_proj.weight", "F8_E4M3", &[3, 4, 8]),
            (
                "model.layers.3.moe.gate_proj.weight_scale_inv",
                "F32",
                &[3, 1, 1],
            ),
            ("model.layers.3.moe.up_proj.weight", "F8_E4M3", &[3, 4, 8]),
            ("model.layers.3.moe.down_proj.weight", "F8_E4M3", &[3, 8, 4]),
            ("model.layers.3.moe.gate.weight", "BF16", &[3, 8]),
        ],
        "",
    );
    assert_eq!(l.num_experts, 3);
    assert_eq!(
        leaves(&l, 0)[1],
        of(Gate, "weight_scale_inv", Stacked, &[1, 1], 3)
    );
    let two = |a: T<'_>, b: T<'_>, role: Role| {
        let l = only_layer(&[a, b], "");
        let got = leaves(&l, 0);
        assert_eq!((got[0].0, got[1].0, got.len()), (role, Down, 2), "{got:?}");
    };
    let n = "model.layers.0.";
    let name = |s: &str| format!("{n}{s}");
    two(
        (
            &name("block_sparse_moe.input_linear.weight"),
            "BF16",
            &[3, 8, 6],
        ),
        (
            &name("block_sparse_moe.output_linear.weight"),
            "BF16",
            &[3, 6, 4],
        ),
        GateUp,
    );
    two(
        (&name("mlp.experts.w13_weight"), "BF16", &[3, 8, 6]),
        (&name("mlp.experts.w2_weight"), "BF16", &[3, 6, 4]),
        GateUp,
    );
    two(
        (&name("mlp.experts.fc1.weight"), "BF16", &[3, 6, 8]),
        (&name("mlp.experts.fc2.weight"), "BF16", &[3, 4, 6]),
        GateUp,
    );
    two(
        (&name("mixer.switch_mlp.fc1.weight"), "BF16", &[3, 4, 6]),
        (&name("mixer.switch_mlp.fc2.weight"), "BF16", &[3, 6, 4]),
        Up,
    );
    two(
        (&name("mixer.switch_mlp.fc1.weight"), "U32", &[3, 64, 8]),
        (&name("mixer.switch_mlp.fc2.weight"), "U32", &[3, 64, 8]),
        Up,
    );
    two(
        (&name("mlp.switch_mlp.gate_proj.weight"), "U32", &[3, 4, 1]),
        (&name("mlp.switch_mlp.down_proj.weight"), "U32", &[3, 8, 1]),
        Gate,
    );
    two(
        (
            &name("experts.switch_glu.gate_proj.weight"),
            "U32",
            &[3, 4, 1],
        ),
        (
            &name("experts.switch_glu.down_proj.weight"),
            "U32",
            &[3, 8, 1],
        ),
        Gate,
    );
}

#[test]
fn companions_are_sliced_or_common_by_their_first_dimension() {
    let l = only_layer(
        &[
            (
                "model.layers.0.mlp.experts.gate_up_proj",
                "F8_E4M3",
                &[3, 8, 6],
            ),
            (
                "model.layers.0.mlp.experts.gate_up_proj_scale_inv",
                "F32",
                &[3, 1, 1],
            ),
            (
                "model.layers.0.mlp.experts.gate_up_proj_activation_scale",
                "F32",
                &[],
            ),
            (
                "model.layers.0.mlp.experts.down_proj",
                "F8_E4M3",
                &[3, 6, 4],
            ),
            (
                "model.layers.0.mlp.experts.down_proj_activation_scale",
                "F32",
                &[3],
            ),
            ("model.layers.0.mlp.experts.down_proj_other", "F32", &[1]),
        ],
        "",
    );
    assert_eq!(
        leaves(&l, 0),
        [
            of(GateUp, "activation_scale", Common, &[], 0),
            of(GateUp, "scale_inv", Stacked, &[1, 1], 3),
            of(GateUp, "weight", Stacked, &[8, 6], 3),
            of(Down, "activation_scale", Stacked, &[], 3),
            of(Down, "other", Common, &[1], 0),
            of(Down, "weight", Stacked, &[6, 4], 3),
        ]
    );
    assert!(matches!(
        sources(&l, 0)[0],
        LeafSource::Strided { step: 0, .. }
    ));
    assert!(matches!(
        sources(&l, 0)[3],
        LeafSource::Strided { step: 4, .. }
    ));
}

#[test]
fn flattened_rows_need_the_configuration() {
    let t: [T<'_>; 3] = [
        ("transformer.blocks.0.ffn.experts.mlp.w1", "BF16", &[12, 5]),
        ("transformer.blocks.0.ffn.experts.mlp.v1", "BF16", &[12, 5]),
        ("transformer.blocks.0.ffn.experts.mlp.w2", "BF16", &[12, 5]),
    ];
    let l = only_layer(&t, r#"{"ffn_config":{"moe_num_experts":4}}"#);
    assert_eq!(
        leaves(&l, 0),
        [
            of(Gate, "weight", Flattened, &[3, 5], 12),
            of(Up, "weight", Flattened, &[3, 5], 12),
            of(Down, "weight", Flattened, &[3, 5], 12),
        ]
    );
    assert!(matches!(
        sources(&l, 0)[0],
        LeafSource::Strided { step: 30, .. }
    ));
    refusal(&t, "", "ffn_config.moe_num_experts");
    refusal(
        &t,
        r#"{"ffn_config":{"moe_num_experts":5}}"#,
        "5 experts (config.json) do not divide",
    );
}

#[test]
fn ktransformers_parts_make_one_record() {
    let mut t = Vec::new();
    for p in ["gate", "up", "down"] {
        for e in 0..2 {
            for numa in 0..2 {
                t.push((
                    format!("blk.3.ffn_{p}_exps.{e}.numa.{numa}.weight"),
                    "I8",
                    vec![32],
                ));
                t.push((
                    format!("blk.3.ffn_{p}_exps.{e}.numa.{numa}.scale"),
                    "F32",
                    vec![4],
                ));
            }
        }
    }
    let c = one_file_of(&t, "").open().unwrap();
    let l = &c.stacks[0].layers[0];
    assert_eq!(
        (
            &*c.stacks[0].prefix,
            l.num_experts,
            l.classes[0].leaves.len()
        ),
        ("blk", 2, 12)
    );
    assert_eq!(
        leaves(l, 0)[1],
        of(Gate, "numa.0.weight", PerExpert, &[32], 0)
    );
    // One half of one expert's weight is not the expert.
    t.retain(|(n, ..)| n != "blk.3.ffn_up_exps.1.numa.1.weight");
    let why = one_file_of(&t, "").refusal();
    assert!(
        why.contains("\"blk.3.ffn_up_exps.1.numa.1.weight\" is missing"),
        "{why}"
    );
}
