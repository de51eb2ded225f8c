"""The scheduler: one graph on several backends.

In the order of a run:

    support                     what the devices can do, asked once
    records, causes             what the jitted passes share: a record per tensor, one of parameters; why an assignment
    gather, rules, repair       graph -> records; a backend for every node; what the rules leave undone
    split, motion, order        runs of nodes on one backend; cheaper places and better orders for them
    assignment                  all of these for one graph
    planner_graph, layout       what the memory planner sees; where everything lies
    prepare                     from a graph to its run: assign, lay out, place
    run, input_copies           the loop over splits; copies between backends
    hazards, experts            what has to wait for what; weights of which only the experts in use are copied
    scheduler, scheduled_plan, explain  the public class; its runs behind the interface of a plan; what it did and why
"""
