//! The matrices of one expert, as views of its record image: nothing is copied or converted as a whole.

use expert_store::catalogue::{Class, Leaf, Role, Transform};
use zerocopy::FromBytes;
use zerocopy::little_endian::{F32, U16};

use crate::math::dot;

/// Element types that the block computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    /// The upper half of an `f32`.
    Bf16,
    F32,
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Where a matrix `[rows, columns]` lies in an image.
#[derive(Debug, Clone, Copy)]
struct Place {
    element: Element,
    offset: usize,
    rows: usize,
    columns: usize,
}

impl Place {
    fn of(leaf: &Leaf) -> Result<Self, String> {
        let &[rows, columns] = leaf.shape.as_slice() else {
            return Err(format!(
                "{} has shape {:?}: the block knows matrices alone",
                leaf.name, leaf.shape
            ));
        };
        if leaf.transform != Transform::None {
            return Err(format!("{} is stored transposed", leaf.name));
        }
        let element = match leaf.dtype.name() {
            "BF16" => Element::Bf16,
            "F32" => Element::F32,
            other => {
                return Err(format!(
                    "{} is of type {other}: the block knows BF16 and F32",
                    leaf.name
                ));
            }
        };
        // A class has passed its checks: shape, bytes and offset fit together and are below 2^34.
        Ok(Self {
            element,
            offset: leaf.image_offset as usize,
            rows: rows as usize,
            columns: columns as usize,
        })
    }

    /// The first and the second half of the rows.
    fn halves(self) -> Result<(Self, Self), String> {
        if self.rows % 2 != 0 {
            return Err(format!("gate and up together have {} rows", self.rows));
        }
        let rows = self.rows / 2;
        let first = Self { rows, ..self };
        let offset = self.offset + rows * self.columns * self.element.bytes();
        Ok((first, Self { offset, ..first }))
    }

    fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    fn view<'a>(&self, image: &'a [u8]) -> Result<Matrix<'a>, String> {
        let end = self.offset + self.rows * self.columns * self.element.bytes();
        let bytes = image
            .get(self.offset..end)
            .ok_or_else(|| format!("an image of {} bytes, a leaf ends at {end}", image.len()))?;
        let weights = match self.element {
            Element::Bf16 => <[U16]>::ref_from_bytes(bytes).map(Weights::Bf16).ok(),
            Element::F32 => <[F32]>::ref_from_bytes(bytes).map(Weights::F32).ok(),
        };
        Ok(Matrix {
            weights: weights.ok_or("a leaf is not whole elements")?,
            rows: self.rows,
            columns: self.columns,
        })
    }
}

/// Where gate, up and down lie in the images of a class, and that they fit together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    gate: Place,
    up: Place,
    down: Place,
}

impl Layout {
    /// Finds them, gate and up each on its own or as one tensor with the gate first.
    ///
    /// *Errors*: text for people that says what the record has and what would do.
    pub(crate) fn of(class: &Class) -> Result<Self, String> {
        let mut found: [Option<Place>; 4] = [None; 4];
        for leaf in &class.leaves {
            let index = match leaf.role {
                Role::Gate => 0,
                Role::Up => 1,
                Role::Down => 2,
                Role::GateUp => 3,
                Role::Other => {
                    return Err(format!(
                        "{} is no projection: the block knows gate, up and down",
                        leaf.name
                    ));
                }
            };
            if found[index].replace(Place::of(leaf)?).is_some() {
                return Err(format!(
                    "{} is a second tensor of one projection: the block knows weights without scales and biases",
                    leaf.name
                ));
            }
        }
        let (gate, up, down) = match found {
            [Some(gate), Some(up), Some(down), None] => (gate, up, down),
            [None, None, Some(down), Some(both)] => {
                let (gate, up) = both.halves()?;
                (gate, up, down)
            }
            _ => return Err("the block needs gate, up and down".into()),
        };
        if gate.shape() != up.shape() || down.shape() != [gate.columns, gate.rows] {
            return Err(format!(
                "gate {:?}, up {:?} and down {:?} are not [inter, hidden] twice and [hidden, inter]",
                gate.shape(),
                up.shape(),
                down.shape()
            ));
        }
        Ok(Self { gate, up, down })
    }

    /// Columns of gate and up, rows of down.
    pub(crate) fn hidden(&self) -> usize {
        self.gate.columns
    }

    /// Views of one image.
    ///
    /// *Errors*: text for people where the image is not of the class.
    pub(crate) fn view<'a>(&self, image: &'a [u8]) -> Result<Projections<'a>, String> {
        Ok(Projections {
            gate: self.gate.view(image)?,
            up: self.up.view(image)?,
            down: self.down.view(image)?,
        })
    }
}

/// Rows of weights, as they lie in the image.
#[derive(Debug, Clone, Copy)]
enum Weights<'a> {
    Bf16(&'a [U16]),
    F32(&'a [F32]),
}

/// A matrix in an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    weights: Weights<'a>,
    pub(crate) rows: usize,
    columns: usize,
}

impl Matrix<'_> {
    /// One row times a column.
    pub(crate) fn row_dot(&self, row: usize, x: &[f32]) -> f32 {
        let part = row * self.columns..(row + 1) * self.columns;
        match self.weights {
            Weights::Bf16(w) => dot(&w[part], x, |v| f32::from_bits(u32::from(v.get()) << 16)),
            Weights::F32(w) => dot(&w[part], x, |v| v.get()),
        }
    }
}

/// The matrices of one expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Projections<'a> {
    pub(crate) gate: Matrix<'a>,
    pub(crate) up: Matrix<'a>,
    pub(crate) down: Matrix<'a>,
}

#[cfg(test)]
mod tests {
    use expert_store::Dtype;
    use expert_store::catalogue::Stacking;

    use super::*;

    fn leaf(role: Role, leaf: &str, dtype: &str, shape: &[u64]) -> Leaf {
        let dtype = Dtype::from_name(dtype).unwrap();
        Leaf {
            role,
            leaf: leaf.into(),
            name: format!("{role:?}.{leaf}"),
            stacking: Stacking::Stacked,
            dtype,
            shape: shape.to_vec(),
            source_dim0: 1,
            image_offset: 0,
            bytes: dtype.tensor_bytes(shape).unwrap(),
            transform: Transform::None,
        }
    }

    fn refused(leaves: Vec<Leaf>) -> String {
        Layout::of(&Class::layout(leaves).unwrap()).unwrap_err()
    }

    fn image_of(class: &Class, values: &[&[f32]]) -> Vec<u8> {
        let mut image = vec![0xff; class.image_bytes as usize];
        for (leaf, values) in class.leaves.iter().zip(values) {
            let mut at = leaf.image_offset as usize;
            for value in *values {
                let bits = value.to_bits().to_le_bytes();
                let bytes = match leaf.dtype.name() {
                    "BF16" => &bits[2..],
                    _ => &bits[..],
                };
                image[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
            }
        }
        image
    }

    #[test]
    fn separate_and_fused_projections_of_both_types_give_the_same_products() {
        let (gate, up, down) = ([1.0, 2.0], [3.0, -4.0], [0.5, 8.0]);
        for dtype in ["BF16", "F32"] {
            let separate = Class::layout(vec![
                leaf(Role::Gate, "weight", dtype, &[1, 2]),
                leaf(Role::Up, "weight", dtype, &[1, 2]),
                leaf(Role::Down, "weight", dtype, &[2, 1]),
            ]);
            let fused = Class::layout(vec![
                leaf(Role::GateUp, "weight", dtype, &[2, 2]),
                leaf(Role::Down, "weight", dtype, &[2, 1]),
            ]);
            let both = [gate, up].concat();
            let cases = [
                (separate.unwrap(), vec![&gate[..], &up, &down]),
                (fused.unwrap(), vec![&both[..], &down]),
            ];
            for (class, values) in cases {
                let layout = Layout::of(&class).unwrap();
                assert_eq!(layout.hidden(), 2);
                // One byte off: the views need no alignment.
                let mut image = image_of(&class, &values);
                image.insert(0, 0);
                let expert = layout.view(&image[1..]).unwrap();
                assert_eq!(expert.gate.rows, 1);
                assert_eq!(expert.gate.row_dot(0, &[1.0, 10.0]), 21.0);
                assert_eq!(expert.up.row_dot(0, &[1.0, 10.0]), -37.0);
                assert_eq!(expert.down.row_dot(1, &[2.0]), 16.0);
            }
        }
    }

    #[test]
    fn what_the_block_cannot_compute_is_refused_by_name() {
        let fit = |dtype| {
            vec![
                leaf(Role::Gate, "weight", dtype, &[4, 8]),
                leaf(Role::Up, "weight", dtype, &[4, 8]),
                leaf(Role::Down, "weight", dtype, &[8, 4]),
            ]
        };
        assert!(refused(fit("F8_E4M3")).contains("F8_E4M3"));
        let mut scaled = fit("BF16");
        scaled.push(leaf(Role::Up, "bias", "BF16", &[4, 1]));
        assert!(refused(scaled).contains("biases"));
        let mut odd = fit("BF16");
        odd[2] = leaf(Role::Down, "weight", "BF16", &[4, 8]);
        assert!(refused(odd).contains("down [4, 8]"));
        let mut opaque = fit("BF16");
        opaque.push(leaf(Role::Other, "weight", "BF16", &[4, 1]));
        assert!(refused(opaque).contains("no projection"));
        assert!(refused(fit("F32")[1..].to_vec()).contains("needs gate"));
        let deep = vec![leaf(Role::Down, "weight", "BF16", &[1, 2, 3])];
        assert!(refused(deep).contains("matrices"));
    }

    #[test]
    fn image_that_is_too_short_is_refused() {
        let class = Class::layout(vec![
            leaf(Role::GateUp, "weight", "BF16", &[2, 2]),
            leaf(Role::Down, "weight", "BF16", &[2, 1]),
        ])
        .unwrap();
        let layout = Layout::of(&class).unwrap();
        let image = vec![0; class.image_bytes as usize];
        assert!(layout.view(&image).is_ok());
        assert!(layout.view(&image[..257]).is_err());
    }
}
