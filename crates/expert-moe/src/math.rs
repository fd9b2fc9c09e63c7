//! Arithmetic in a fixed order: the same bits from the same bits.

/// Sums side by side in a dot product, which compilers turn into vector instructions without a change of order.
const LANES: usize = 16;

/// Sum of the products of two rows. Both have one length; what one has more is left out.
pub(crate) fn dot<W: Copy>(weights: &[W], x: &[f32], value: impl Fn(W) -> f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (wide_w, wide_x) = (weights.chunks_exact(LANES), x.chunks_exact(LANES));
    let (rest_w, rest_x) = (wide_w.remainder(), wide_x.remainder());
    for (w, x) in wide_w.zip(wide_x) {
        for lane in 0..LANES {
            sums[lane] += value(w[lane]) * x[lane];
        }
    }
    let mut sum = 0.0;
    for part in sums {
        sum += part;
    }
    for (&w, &x) in rest_w.iter().zip(rest_x) {
        sum += value(w) * x;
    }
    sum
}

/// Scales a row to a mean square of 1.
pub(crate) fn rms_norm(x: &mut [f32]) {
    let squares = dot(x, x, |v| v);
    let scale = 1.0 / (squares / x.len().max(1) as f32 + 1e-6).sqrt();
    for v in x {
        *v *= scale;
    }
}

/// `x * sigmoid(x)`.
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// Indices of the `k` largest values, the largest first, of equal ones the first; with their share after a softmax
/// over those alone.
pub(crate) fn top_k(values: &[f32], k: usize) -> Vec<(usize, f32)> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order.truncate(k);
    let Some(&largest) = order.first() else {
        return Vec::new();
    };
    let shares: Vec<f32> = order
        .iter()
        .map(|&i| (values[i] - values[largest]).exp())
        .collect();
    let mut sum = 0.0;
    for share in &shares {
        sum += share;
    }
    order
        .into_iter()
        .zip(shares.iter().map(|s| s / sum))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_takes_every_element_once() {
        for n in [0, 1, 15, 16, 17, 50] {
            let w: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let want = (0..n).map(|i| i * i).sum::<i32>();
            assert_eq!(dot(&w, &w, |v| v), want as f32, "{n}");
        }
    }

    #[test]
    fn top_k_is_ordered_and_its_shares_make_one() {
        let chosen = top_k(&[0.5, 2.0, 0.5, -1.0, 2.0], 3);
        let indices: Vec<usize> = chosen.iter().map(|c| c.0).collect();
        assert_eq!(indices, [1, 4, 0]);
        assert_eq!(chosen[0].1, chosen[1].1);
        assert!(chosen[1].1 > chosen[2].1);
        let sum: f32 = chosen.iter().map(|c| c.1).sum();
        assert!((sum - 1.0).abs() < 1e-6);
        assert!(top_k(&[], 3).is_empty());
        assert_eq!(top_k(&[1.0], 3).len(), 1);
    }

    #[test]
    fn norm_gives_a_mean_square_of_one_and_leaves_zeros() {
        let mut x = [3.0, -4.0, 12.0, 0.0];
        rms_norm(&mut x);
        let squares: f32 = x.iter().map(|v| v * v).sum();
        assert!((squares / 4.0 - 1.0).abs() < 1e-4);
        let mut zeros = [0.0; 4];
        rms_norm(&mut zeros);
        assert_eq!(zeros, [0.0; 4]);
    }

    #[test]
    fn poison_stays_visible() {
        let nan = f32::from_bits(u32::MAX);
        assert!(dot(&[nan, 0.0], &[0.0, 1.0], |v| v).is_nan());
        assert!(silu(nan).is_nan());
    }
}
