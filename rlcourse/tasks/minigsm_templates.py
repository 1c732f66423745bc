"""The templates of `minigsm`: what its word problems say, how they are solved, and how large their numbers are.

{x} {y} {z} {w} {v} are numbers, and k is a number written as a word: {times} ("three times") or {part} ("a third").
{A} {B} {C} are people; {he} {He} {him} stand for {A}; {things} are what they have and {boxes} (one {box}) hold them.
A step has its calculation in brackets; r1 is the result of the first step, r2 of the second.
"""

from rlcourse.tasks.minigsm_words import Template

ONE_STEP = [
    Template(
        "gift",
        "{A} has {x} {things}. {B} gives {him} {y} more {things}. How many {things} does {A} have now?",
        ["{A} has [x+y] {things}."],
        {"x": (3, 60), "y": (2, 39)},
    ),
    Template(
        "given_away",
        "{A} has {x} {things} and gives {y} of them to {B}. How many {things} does {A} have left?",
        ["{A} has [x-y] {things}."],
        {"x": (9, 90), "y": (2, 80)},
    ),
    Template(
        "more_than",
        "{A} has {x} {things}. {B} has {y} more {things} than {A}. How many {things} does {B} have?",
        ["{B} has [x+y] {things}."],
        {"x": (3, 60), "y": (2, 39)},
    ),
    Template(
        "fewer_than",
        "{A} has {x} {things}. {B} has {y} fewer {things} than {A}. How many {things} does {B} have?",
        ["{B} has [x-y] {things}."],
        {"x": (9, 90), "y": (2, 80)},
    ),
    Template(
        "pages",
        "{A} has read {x} pages of a book with {y} pages. How many pages does {A} have left to read?",
        ["{A} has [y-x] pages left."],
        {"x": (5, 90), "y": (20, 150)},
    ),
    Template(
        "boxes",
        "{A} buys {x} {boxes} of {things}. Each {box} holds {y} {things}. How many {things} does {A} buy?",
        ["{A} buys [x*y] {things}."],
        {"x": (2, 30), "y": (2, 20)},
    ),
    Template(
        "price",
        "A {box} of {things} costs ${x}. How many dollars do {y} {boxes} cost?",
        ["The {boxes} cost [x*y] dollars."],
        {"x": (2, 30), "y": (2, 12)},
    ),
    Template(
        "times",
        "{A} has {x} {things}. {B} has {times} as many {things} as {A}. How many {things} does {B} have?",
        ["{B} has [k*x] {things}."],
        {"x": (3, 60), "k": (2, 5)},
    ),
    Template(
        "share",
        "{A} shares {x} {things} equally among {y} friends. How many {things} does each friend get?",
        ["Each friend gets [x/y] {things}."],
        {"x": (6, 180), "y": (3, 9)},
    ),
    Template(
        "packing",
        "{A} puts {x} {things} into {boxes}, {y} in each {box}. How many {boxes} does {A} fill?",
        ["{A} fills [x/y] {boxes}."],
        {"x": (6, 180), "y": (2, 9)},
    ),
    Template(
        "part",
        "{A} has {x} {things} and gives {part} of them to {B}. How many {things} does {B} get?",
        ["{B} gets [x/k] {things}."],
        {"x": (6, 180), "k": (2, 5)},
    ),
]

TWO_STEPS = [
    Template(
        "times_in_all",
        "{A} has {x} {things}. {B} has {times} as many {things} as {A}. How many {things} do they have in all?",
        ["{B} has [k*x] {things}.", "They have [x+r1] {things}."],
        {"x": (3, 60), "k": (2, 5)},
    ),
    Template(
        "more_in_all",
        "{A} has {x} {things}. {B} has {y} more {things} than {A}. How many {things} do they have in all?",
        ["{B} has [x+y] {things}.", "They have [x+r1] {things}."],
        {"x": (4, 60), "y": (2, 40)},
    ),
    Template(
        "fewer_in_all",
        "{A} has {x} {things}. {B} has {y} fewer {things} than {A}. How many {things} do they have in all?",
        ["{B} has [x-y] {things}.", "They have [x+r1] {things}."],
        {"x": (9, 90), "y": (2, 60)},
    ),
    Template(
        "find_and_lose",
        "{A} has {x} {things}. {He} finds {y} more and then loses {z}. How many {things} does {A} have now?",
        ["{A} has [x+y] {things}.", "{He} has [r1-z] {things}."],
        {"x": (5, 60), "y": (3, 40), "z": (2, 60)},
    ),
    Template(
        "give_and_lose",
        "{A} has {x} {things}. {He} gives {y} to {B} and then loses {z}. How many {things} does {A} have left?",
        ["{A} has [x-y] {things}.", "{He} has [r1-z] {things}."],
        {"x": (20, 99), "y": (2, 60), "z": (2, 40)},
    ),
    Template(
        "boxes_and_more",
        "{A} buys {x} {boxes} with {y} {things} in each {box}. {He} already had {z} {things}. "
        "How many {things} does {A} have now?",
        ["{A} buys [x*y] {things}.", "{He} has [r1+z] {things}."],
        {"x": (2, 12), "y": (2, 12), "z": (2, 40)},
    ),
    Template(
        "boxes_sold",
        "{A} has {x} {boxes} with {y} {things} in each {box}. {He} sells {z} {things}. "
        "How many {things} does {A} have left?",
        ["{A} has [x*y] {things}.", "{He} has [r1-z] {things}."],
        {"x": (2, 12), "y": (3, 12), "z": (2, 60)},
    ),
    Template(
        "change",
        "{A} has ${z}. {He} buys {x} {boxes} of {things} for ${y} each. How many dollars does {A} have left?",
        ["The {boxes} cost [x*y] dollars.", "{A} has [z-r1] dollars."],
        {"z": (10, 120), "x": (2, 9), "y": (2, 15)},
    ),
    Template(
        "savings",
        "{A} saves ${x} a week for {y} weeks and then spends ${z}. How many dollars does {A} have left?",
        ["{A} saves [x*y] dollars.", "{He} has [r1-z] dollars."],
        {"x": (2, 20), "y": (2, 9), "z": (2, 60)},
    ),
    Template(
        "buy_and_share",
        "{A} has {x} {things} and buys {y} more. {He} shares them all equally among {z} friends. "
        "How many {things} does each friend get?",
        ["{A} has [x+y] {things}.", "Each friend gets [r1/z] {things}."],
        {"x": (4, 60), "y": (2, 40), "z": (3, 9)},
    ),
    Template(
        "keep_and_share",
        "{A} has {x} {things}. {He} keeps {y} and shares the rest equally among {z} friends. "
        "How many {things} does each friend get?",
        ["{A} shares [x-y] {things}.", "Each friend gets [r1/z] {things}."],
        {"x": (10, 90), "y": (2, 40), "z": (3, 9)},
    ),
    Template(
        "share_and_had",
        "{A} shares {x} {things} equally among {y} friends. {B} is one of them and already had {z} {things}. "
        "How many {things} does {B} have now?",
        ["{B} gets [x/y] {things}.", "{B} has [r1+z] {things}."],
        {"x": (6, 120), "y": (3, 9), "z": (2, 40)},
    ),
    Template(
        "pack_and_sell",
        "{A} puts {x} {things} into {boxes}, {y} in each {box}, and sells each {box} for ${z}. "
        "How many dollars does {A} get?",
        ["{A} fills [x/y] {boxes}.", "{He} gets [r1*z] dollars."],
        {"x": (6, 120), "y": (2, 9), "z": (2, 12)},
    ),
]

THREE_STEPS = [
    Template(
        "two_lots",
        "{A} has {x} {boxes} with {y} {things} in each {box}. {B} has {z} {boxes} with {w} {things} in each {box}. "
        "How many {things} do they have in all?",
        ["{A} has [x*y] {things}.", "{B} has [z*w] {things}.", "They have [r1+r2] {things}."],
        {"x": (2, 9), "y": (2, 12), "z": (2, 9), "w": (2, 12)},
    ),
    Template(
        "sell_the_rest",
        "{A} has {x} {boxes} with {y} {things} in each {box}. {He} keeps {z} {things} and sells the rest "
        "for ${w} each. How many dollars does {A} get?",
        ["{A} has [x*y] {things}.", "{He} sells [r1-z] {things}.", "{He} gets [r2*w] dollars."],
        {"x": (2, 9), "y": (2, 9), "z": (2, 40), "w": (2, 5)},
    ),
    Template(
        "times_and_sell",
        "{A} has {x} {things}. {B} has {times} as many {things} as {A}. They sell {y} {things}. "
        "How many {things} do they have left?",
        ["{B} has [k*x] {things}.", "They have [x+r1] {things}.", "They have [r2-y] {things}."],
        {"x": (3, 40), "k": (2, 5), "y": (2, 90)},
    ),
    Template(
        "more_and_times",
        "{A} has {x} {things}. {B} has {y} more {things} than {A}. {C} has {times} as many {things} as {B}. "
        "How many {things} do {B} and {C} have in all?",
        ["{B} has [x+y] {things}.", "{C} has [k*r1] {things}.", "They have [r1+r2] {things}."],
        {"x": (3, 40), "y": (2, 30), "k": (2, 5)},
    ),
    Template(
        "cakes",
        "{A} bakes {x} cakes on Monday and {y} cakes on Tuesday. {He} keeps {z} cakes and sells the rest "
        "for ${w} each. How many dollars does {A} get?",
        ["{A} bakes [x+y] cakes.", "{He} sells [r1-z] cakes.", "{He} gets [r2*w] dollars."],
        {"x": (3, 30), "y": (2, 30), "z": (2, 30), "w": (2, 9)},
    ),
    Template(
        "two_purchases",
        "{A} buys {x} {boxes} of {things} for ${y} each and {z} cakes for ${w} each. How many dollars does {A} pay?",
        ["The {boxes} cost [x*y] dollars.", "The cakes cost [z*w] dollars.", "{A} pays [r1+r2] dollars."],
        {"x": (2, 9), "y": (2, 12), "z": (2, 9), "w": (2, 9)},
    ),
    Template(
        "two_days",
        "{A} has {x} {things}. {He} finds {y} more on Monday and {z} more on Tuesday. Then {he} gives {w} to {B}. "
        "How many {things} does {A} have left?",
        ["{A} has [x+y] {things}.", "{He} has [r1+z] {things}.", "{He} has [r2-w] {things}."],
        {"x": (3, 50), "y": (2, 30), "z": (2, 30), "w": (2, 60)},
    ),
    Template(
        "wages",
        "{A} earns ${x} an hour. {He} works {y} hours on Monday and {z} hours on Tuesday and then spends ${w}. "
        "How many dollars does {A} have left?",
        ["{A} works [y+z] hours.", "{He} earns [r1*x] dollars.", "{He} has [r2-w] dollars."],
        {"x": (5, 20), "y": (2, 9), "z": (2, 9), "w": (5, 90)},
    ),
    Template(
        "part_and_lose",
        "{A} has {x} {things}. {He} gives {part} of them to {B} and then loses {y}. "
        "How many {things} does {A} have left?",
        ["{B} gets [x/k] {things}.", "{A} has [x-r1] {things}.", "{He} has [r2-y] {things}."],
        {"x": (8, 120), "k": (2, 5), "y": (2, 40)},
    ),
    Template(
        "boxes_shared",
        "{A} buys {x} {boxes} with {y} {things} in each {box}. {He} shares them all equally among {z} friends. "
        "{B} is one of them and already had {w} {things}. How many {things} does {B} have now?",
        ["{A} buys [x*y] {things}.", "{B} gets [r1/z] {things}.", "{B} has [r2+w] {things}."],
        {"x": (2, 9), "y": (2, 20), "z": (3, 9), "w": (2, 40)},
    ),
]

FOUR_STEPS = [
    Template(
        "two_lots_sold",
        "{A} has {x} {boxes} with {y} {things} in each {box}. {B} has {z} {boxes} with {w} {things} in each {box}. "
        "They sell {v} {things}. How many {things} do they have left?",
        [
            "{A} has [x*y] {things}.",
            "{B} has [z*w] {things}.",
            "They have [r1+r2] {things}.",
            "They have [r3-v] {things}.",
        ],
        {"x": (2, 9), "y": (2, 12), "z": (2, 9), "w": (2, 12), "v": (2, 90)},
    ),
    Template(
        "two_lots_shared",
        "{A} has {x} {boxes} with {y} {things} in each {box}. {B} has {z} {boxes} with {w} {things} in each {box}. "
        "They share them all equally among {v} friends. How many {things} does each friend get?",
        [
            "{A} has [x*y] {things}.",
            "{B} has [z*w] {things}.",
            "They have [r1+r2] {things}.",
            "Each friend gets [r3/v] {things}.",
        ],
        {"x": (2, 9), "y": (2, 12), "z": (2, 9), "w": (2, 12), "v": (3, 9)},
    ),
    Template(
        "two_purchases_change",
        "{A} has ${v}. {He} buys {x} {boxes} of {things} for ${y} each and {z} cakes for ${w} each. "
        "How many dollars does {A} have left?",
        [
            "The {boxes} cost [x*y] dollars.",
            "The cakes cost [z*w] dollars.",
            "{A} pays [r1+r2] dollars.",
            "{He} has [v-r3] dollars.",
        ],
        {"v": (20, 180), "x": (2, 9), "y": (2, 12), "z": (2, 9), "w": (2, 9)},
    ),
    Template(
        "three_people",
        "{A} has {x} {things}. {B} has {y} more {things} than {A}. {C} has {times} as many {things} as {B}. "
        "How many {things} do the three have in all?",
        [
            "{B} has [x+y] {things}.",
            "{C} has [k*r1] {things}.",
            "{A} and {B} have [x+r1] {things}.",
            "They have [r3+r2] {things}.",
        ],
        {"x": (3, 40), "y": (2, 30), "k": (2, 5)},
    ),
    Template(
        "cakes_in_boxes",
        "{A} bakes {x} cakes on Monday and {y} cakes on Tuesday. {He} keeps {z} cakes, puts the rest into {boxes}, "
        "{w} in each {box}, and sells each {box} for ${v}. How many dollars does {A} get?",
        [
            "{A} bakes [x+y] cakes.",
            "{He} sells [r1-z] cakes.",
            "{He} fills [r2/w] {boxes}.",
            "{He} gets [r3*v] dollars.",
        ],
        {"x": (3, 50), "y": (2, 50), "z": (2, 30), "w": (2, 9), "v": (2, 12)},
    ),
    Template(
        "three_days",
        "{A} has {x} {things}. {He} finds {y} more on Monday and {z} more on Tuesday. "
        "Then {he} keeps {w} and sells the rest for ${v} each. How many dollars does {A} get?",
        [
            "{A} has [x+y] {things}.",
            "{He} has [r1+z] {things}.",
            "{He} sells [r2-w] {things}.",
            "{He} gets [r3*v] dollars.",
        ],
        {"x": (3, 40), "y": (2, 30), "z": (2, 30), "w": (2, 60), "v": (2, 9)},
    ),
    Template(
        "part_of_boxes",
        "{A} has {x} {boxes} with {y} {things} in each {box}. {He} gives {part} of the {things} to {B} "
        "and then buys {z} more. How many {things} does {A} have now?",
        [
            "{A} has [x*y] {things}.",
            "{B} gets [r1/k] {things}.",
            "{A} has [r1-r2] {things}.",
            "{He} has [r3+z] {things}.",
        ],
        {"x": (2, 9), "y": (2, 20), "k": (2, 5), "z": (2, 40)},
    ),
    Template(
        "wages_and_boxes",
        "{A} earns ${x} an hour. {He} works {y} hours on Monday and {z} hours on Tuesday. Then {he} buys {w} {boxes} "
        "of {things} for ${v} each. How many dollars does {A} have left?",
        [
            "{A} works [y+z] hours.",
            "{He} earns [r1*x] dollars.",
            "The {boxes} cost [w*v] dollars.",
            "{He} has [r2-r3] dollars.",
        ],
        {"x": (5, 20), "y": (2, 9), "z": (2, 9), "w": (2, 9), "v": (2, 12)},
    ),
]

TEMPLATES = ONE_STEP + TWO_STEPS + THREE_STEPS + FOUR_STEPS
