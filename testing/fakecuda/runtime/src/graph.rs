//! Graphs: operations with an order among them, which a launch puts into a stream.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use crate::clock::{Accesses, Clock};
use crate::operation::{Kind, Operation};

/// What a node does at each launch.
#[derive(Clone)]
pub enum Step {
    Run(Operation),
    /// Records an event outside of the graph.
    Record(u64),
    /// Waits for an event from outside of the graph.
    Wait(u64),
}

/// A node. Its number is its handle, and no two nodes of all graphs have the same.
#[derive(Clone)]
pub struct Node {
    pub number: usize,
    /// The stream that it was captured in, and its place among the nodes from there.
    pub from: (u64, u64),
    /// Numbers of earlier nodes of the same graph.
    pub dependencies: Vec<usize>,
    pub step: Step,
}

impl Node {
    /// Whether the real device would have this node.
    fn is_real(&self) -> bool {
        !matches!(&self.step, Step::Run(operation) if operation.kind == Kind::Numbers)
    }

    /// The node's type, whatever its parameters are.
    fn kind(&self) -> &'static str {
        match &self.step {
            Step::Run(operation) => match operation.kind {
                Kind::Kernel => "kernel",
                Kind::Copy(_) => "copy",
                Kind::Fill(_) => "fill",
                Kind::Host => "host function",
                Kind::Numbers => "numbers",
            },
            Step::Record(_) => "event record",
            Step::Wait(_) => "event wait",
        }
    }

    fn what(&self) -> &str {
        match &self.step {
            Step::Run(operation) => &operation.what,
            Step::Record(_) | Step::Wait(_) => self.kind(),
        }
    }
}

/// Nodes, each behind those that it depends on.
#[derive(Clone, Default)]
pub struct Graph {
    pub nodes: Vec<Node>,
}

/// Why an executable graph cannot become another one; the node of the other one, or 0.
#[derive(Debug, PartialEq, Eq)]
pub enum Difference {
    Topology(usize),
    Kind(usize),
}

impl Graph {
    /// The handles of the nodes that the real device would have.
    pub fn real_nodes(&self) -> Vec<usize> {
        self.nodes.iter().filter(|node| node.is_real()).map(|node| node.number).collect()
    }

    /// The nearest real nodes that a node depends on; `None` if it is not in this graph.
    pub fn dependencies(&self, number: usize) -> Option<Vec<usize>> {
        let by_number: BTreeMap<usize, &Node> = self.nodes.iter().map(|node| (node.number, node)).collect();
        let mut open = by_number.get(&number)?.dependencies.clone();
        let mut found = BTreeSet::new();
        while let Some(number) = open.pop() {
            match by_number.get(&number) {
                Some(node) if !node.is_real() => open.extend(&node.dependencies),
                _ => {
                    found.insert(number);
                }
            }
        }
        Some(found.into_iter().collect())
    }

    /// The nodes that these depend on, however far, and they themselves.
    pub fn reaches(&self, ends: &[usize]) -> BTreeSet<usize> {
        let mut reached: BTreeSet<usize> = ends.iter().copied().collect();
        for node in self.nodes.iter().rev() {
            if reached.contains(&node.number) {
                reached.extend(&node.dependencies);
            }
        }
        reached
    }

    /// The accesses of nodes that have no order among them, in words. A launch runs nodes one after another, so only
    /// the dependencies show these.
    pub fn races(&self) -> Vec<String> {
        let (mut clocks, mut accesses) = (BTreeMap::<usize, Clock>::new(), Accesses::default());
        let mut races = Vec::new();
        for node in &self.nodes {
            let mut clock = Clock::default();
            node.dependencies.iter().filter_map(|number| clocks.get(number)).for_each(|own| clock.join(own));
            clock.set(node.from.0, node.from.1);
            if let Step::Run(operation) = &node.step {
                let found = accesses.note(node.from, &operation.what, &operation.accesses, &clock);
                races.extend(found.iter().map(ToString::to_string));
            }
            clocks.insert(node.number, clock);
        }
        races
    }

    /// How this graph differs from another one in what an update cannot change: the number of nodes, their
    /// dependencies, and their types. The nodes are compared in their order, as a repeated capture makes them.
    pub fn difference(&self, new: &Self) -> Option<Difference> {
        let (old_real, new_real) = (self.real_nodes(), new.real_nodes());
        if old_real.len() != new_real.len() {
            return Some(Difference::Topology(0));
        }
        let places = |numbers: Vec<usize>, all: &[usize]| -> Vec<Option<usize>> {
            numbers.iter().map(|number| all.iter().position(|it| it == number)).collect()
        };
        let kind = |graph: &Self, number| graph.nodes.iter().find(|node| node.number == number).map(Node::kind);
        old_real.iter().zip(&new_real).find_map(|(&one, &other)| {
            let old = places(self.dependencies(one).unwrap_or_default(), &old_real);
            let new_places = places(new.dependencies(other).unwrap_or_default(), &new_real);
            match (old == new_places, kind(self, one) == kind(new, other)) {
                (false, _) => Some(Difference::Topology(other)),
                (true, false) => Some(Difference::Kind(other)),
                (true, true) => None,
            }
        })
    }

    /// The graph in the language of Graphviz.
    pub fn dot(&self) -> String {
        let mut text = "digraph captured {\n".to_owned();
        let (real, nodes) = (self.real_nodes(), self.nodes.iter());
        for node in nodes.filter(|node| node.is_real()) {
            let label = format!("{}: {}", node.kind(), node.what()).replace('"', "'");
            // Writing into a text cannot fail.
            let _ = writeln!(text, "  n{} [label=\"{label}\"];", node.number);
        }
        for number in real {
            for before in self.dependencies(number).unwrap_or_default() {
                let _ = writeln!(text, "  n{before} -> n{number};");
            }
        }
        text + "}\n"
    }
}

/// A graph that can be launched, and the event that its last launch records: launches of it run one after another.
pub struct Executable {
    pub graph: Arc<Graph>,
    pub launched: u64,
}

/// All graphs, by their handles.
#[derive(Default)]
pub struct Graphs {
    pub graphs: BTreeMap<usize, Graph>,
    pub executables: BTreeMap<usize, Executable>,
    last: usize,
}

impl Graphs {
    /// A handle or a node's number, which nothing else has had.
    pub fn number(&mut self) -> usize {
        // A program takes it for an address, and 0 for none.
        self.last += 16;
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Access;

    fn node(number: usize, stream: u64, dependencies: &[usize], kind: Kind) -> Node {
        let mut operation = Operation::new(kind, &format!("node {number}"), Arc::new(|| {}));
        operation.accesses = vec![Access { bytes: 0..8, writes: true }];
        Node { number, from: (stream, number as u64), dependencies: dependencies.to_vec(), step: Step::Run(operation) }
    }

    #[test]
    fn nodes_without_an_order_race_and_those_with_one_do_not() {
        let fork = [node(1, 1, &[], Kind::Kernel), node(2, 2, &[1], Kind::Kernel), node(3, 1, &[1], Kind::Kernel)];
        let races = Graph { nodes: fork.to_vec() }.races();
        assert_eq!(races.len(), 1);
        assert!(races[0].contains("node 2") && races[0].contains("node 3"), "{races:?}");
        let line = [node(1, 1, &[], Kind::Kernel), node(2, 2, &[1], Kind::Kernel), node(3, 1, &[1, 2], Kind::Kernel)];
        assert_eq!(Graph { nodes: line.to_vec() }.races(), [""; 0]);
    }

    #[test]
    fn numbers_are_no_nodes_and_dependencies_go_through_them() {
        let nodes = vec![node(1, 1, &[], Kind::Kernel), node(2, 1, &[1], Kind::Numbers), node(3, 1, &[2], Kind::Host)];
        let graph = Graph { nodes };
        assert_eq!(graph.real_nodes(), [1, 3]);
        assert_eq!((graph.dependencies(3), graph.dependencies(9)), (Some(vec![1]), None));
        assert_eq!(graph.reaches(&[2]), BTreeSet::from([1, 2]));
        let dot = graph.dot();
        assert!(dot.contains("n1 -> n3;") && !dot.contains("n2") && dot.contains("host function: node 3"), "{dot}");
    }

    #[test]
    fn an_update_changes_parameters_and_nothing_else() {
        let graph = |nodes: &[Node]| Graph { nodes: nodes.to_vec() };
        let old = graph(&[node(1, 1, &[], Kind::Kernel), node(2, 1, &[1], Kind::Copy(8))]);
        let same = graph(&[node(5, 1, &[], Kind::Kernel), node(6, 1, &[5], Kind::Copy(16))]);
        assert_eq!(old.difference(&same), None);
        let fewer = graph(&[node(5, 1, &[], Kind::Kernel)]);
        assert_eq!(old.difference(&fewer), Some(Difference::Topology(0)));
        let apart = graph(&[node(5, 1, &[], Kind::Kernel), node(6, 1, &[], Kind::Copy(8))]);
        assert_eq!(old.difference(&apart), Some(Difference::Topology(6)));
        let other = graph(&[node(5, 1, &[], Kind::Kernel), node(6, 1, &[5], Kind::Kernel)]);
        assert_eq!(old.difference(&other), Some(Difference::Kind(6)));
    }
}
