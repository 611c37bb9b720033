//! Call stacks to a flame graph: a picture in SVG that any browser shows, with no script in it.

use std::collections::BTreeMap;

/// Pixels across the whole graph.
const WIDTH: f64 = 1200.0;
/// Pixels from one row to the next.
const ROW: usize = 17;
/// Pixels a letter takes, about.
const LETTER: f64 = 6.6;
/// Pixels that a box needs in order to be seen, and so drawn.
const VISIBLE: f64 = 0.3;

/// A function, how often it was met in this place, and what it called.
#[derive(Default)]
struct Node {
    samples: u64,
    callees: BTreeMap<String, Node>,
}

/// Draws stacks, each with its number of samples and its functions from the outermost to the innermost.
pub(super) fn svg(title: &str, stacks: impl Iterator<Item = (Vec<String>, u64)>) -> String {
    let mut root = Node::default();
    for (stack, samples) in stacks {
        root.samples += samples;
        let mut node = &mut root;
        for function in stack {
            node = node.callees.entry(function).or_default();
            node.samples += samples;
        }
    }
    let mut boxes = String::new();
    let mut canvas = Canvas { boxes: &mut boxes, total: root.samples, rows: 0 };
    canvas.draw(title, &root, 0.0, 0);
    let height = (canvas.rows + 1) * ROW;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"monospace\" \
         font-size=\"11\">\n<style>rect {{ stroke: white; stroke-width: .5 }} g:hover rect {{ fill: gold }}</style>\n\
         {boxes}</svg>\n"
    )
}

struct Canvas<'a> {
    boxes: &'a mut String,
    total: u64,
    rows: usize,
}

impl Canvas<'_> {
    /// Draws a box at `x` pixels in a row, and what its function called side by side below it.
    fn draw(&mut self, name: &str, node: &Node, mut x: f64, row: usize) {
        let share = |samples: u64| samples as f64 / self.total.max(1) as f64;
        let width = share(node.samples) * WIDTH;
        if width < VISIBLE {
            return;
        }
        self.rows = self.rows.max(row);
        let letters = (width / LETTER) as usize;
        let shown = if letters < 3 { "" } else { &name[..name.floor_char_boundary(letters)] };
        let percent = share(node.samples) * 100.0;
        let (y, hue) = (row * ROW, name.bytes().fold(7_u32, |hash, byte| hash.wrapping_mul(31) + u32::from(byte)) % 50);
        self.boxes.push_str(&format!(
            "<g><title>{} ({} samples, {percent:.2}%)</title><rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" \
             height=\"{ROW}\" fill=\"hsl({hue},85%,68%)\"/><text x=\"{:.2}\" y=\"{}\">{}</text></g>\n",
            escaped(name),
            node.samples,
            x + 2.0,
            y + 12,
            escaped(shown),
        ));
        for (name, callee) in &node.callees {
            self.draw(name, callee, x, row + 1);
            x += callee.samples as f64 / self.total.max(1) as f64 * WIDTH;
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(functions: &[&str], samples: u64) -> (Vec<String>, u64) {
        (functions.iter().map(ToString::to_string).collect(), samples)
    }

    #[test]
    fn boxes_are_as_wide_as_their_share_and_stand_under_their_caller() {
        let stacks = [stack(&["main", "read"], 1), stack(&["main", "write<T>"], 3)];
        let svg = svg("all", stacks.into_iter());
        let expected = [
            ("all", 4, "x=\"0.00\" y=\"0\" width=\"1200.00\""),
            ("main", 4, "x=\"0.00\" y=\"17\" width=\"1200.00\""),
            ("read", 1, "x=\"0.00\" y=\"34\" width=\"300.00\""),
            ("write&lt;T&gt;", 3, "x=\"300.00\" y=\"34\" width=\"900.00\""),
        ];
        for (name, samples, place) in expected {
            let line = svg.lines().find(|line| line.contains(&format!("<title>{name} ("))).unwrap();
            assert!(line.contains(&format!("({samples} samples")) && line.contains(place), "{line}");
        }
        assert!(svg.contains("viewBox=\"0 0 1200 51\""));
    }

    #[test]
    fn no_samples_make_an_empty_graph() {
        assert!(svg("all", std::iter::empty()).ends_with("</svg>\n"));
    }
}
