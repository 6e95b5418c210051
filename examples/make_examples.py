"""Write the example data of gptj-ft: clinic notes, question answering and plain text.

Every name, place, note, passage and number in these files is invented for this project by the word
lists and sentence patterns below, and is licensed, like the project, under Apache-2.0. No real patient,
person, company or product is described and nothing here is medical, legal or technical advice.

The generator uses the standard library only and a fixed seed per file, so a second run writes the same
bytes:

    python examples/make_examples.py            # writes next to this file
    python examples/make_examples.py --out DIR  # writes somewhere else

Files: clinic_notes_train.jsonl, clinic_notes_heldout.jsonl, clinic_qa.json, support_qa.jsonl and
field_notes.txt; README.md in this folder describes them.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TRAIN_NOTES = 1100
HELDOUT_NOTES = 60
NOTE_WORDS = (50, 90)
QA_PARAGRAPHS_PER_TOPIC = 10
SUPPORT_ROWS = 80
FIELD_PARAGRAPHS = 150

Row = dict[str, str]


# --------------------------------------------------------------------------------------------------
# Clinic notes: word lists
# --------------------------------------------------------------------------------------------------

# How each medication is taken. The note says so; the summary leaves it out.
HOW_TAKEN: Mapping[str, str] = {
    "aciclovir": "five times a day",
    "amitriptyline": "at night",
    "amlodipine": "once a day",
    "amoxicillin": "three times a day",
    "atorvastatin": "at night",
    "betahistine": "three times a day",
    "bisacodyl": "at night",
    "bisoprolol": "once a day",
    "budesonide": "twice a day",
    "bumetanide": "in the morning",
    "cefalexin": "twice a day",
    "cetirizine": "once a day",
    "citalopram": "once a day",
    "clarithromycin": "twice a day",
    "colchicine": "twice a day",
    "diltiazem": "once a day",
    "doxycycline": "once a day",
    "famotidine": "twice a day",
    "fexofenadine": "once a day",
    "flucloxacillin": "four times a day",
    "furosemide": "in the morning",
    "gliclazide": "with breakfast",
    "ibuprofen": "three times a day",
    "levothyroxine": "in the morning",
    "loratadine": "once a day",
    "losartan": "once a day",
    "metformin": "with meals",
    "mirabegron": "once a day",
    "mirtazapine": "at night",
    "montelukast": "at night",
    "naproxen": "twice a day",
    "nitrofurantoin": "twice a day",
    "omeprazole": "before breakfast",
    "paracetamol": "up to four times a day",
    "prochlorperazine": "three times a day",
    "propranolol": "twice a day",
    "ramipril": "once a day",
    "senna": "at night",
    "sertraline": "once a day",
    "simvastatin": "at night",
    "sitagliptin": "once a day",
    "solifenacin": "once a day",
    "sumatriptan": "when needed",
    "trimethoprim": "twice a day",
    "valaciclovir": "three times a day",
}


@dataclass(frozen=True)
class Condition:
    """One diagnosis with the possible contents of a note; doses of a medication run from low to high."""

    name: str
    symptoms: tuple[str, ...]
    findings: tuple[str, ...]
    medications: Mapping[str, tuple[str, ...]]
    advice: tuple[str, ...]
    referral: str
    course: str  # "acute", "weeks" or "long": which durations, plans and reviews are likely
    youngest: int = 20
    feverish: bool = False
    high_pressure: bool = False
    blood_test: bool = False


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "migraine",
        ("throbbing one-sided headaches", "headaches with nausea", "headaches with flashing lights"),
        ("Eye movements and reflexes normal.", "No neck stiffness and no weakness."),
        {
            "sumatriptan": ("50 mg", "100 mg"),
            "propranolol": ("40 mg", "80 mg"),
            "amitriptyline": ("10 mg", "25 mg"),
        },
        ("keep a headache diary", "avoid skipped meals"),
        "neurology",
        "weeks",
    ),
    Condition(
        "tension headache",
        ("a tight band around the head", "dull headaches late in the day"),
        ("Neck muscles tender, otherwise normal.", "Scalp and eyes normal."),
        {
            "paracetamol": ("500 mg", "1000 mg"),
            "ibuprofen": ("200 mg", "400 mg"),
            "amitriptyline": ("10 mg", "25 mg"),
        },
        ("take screen breaks", "do relaxation exercises"),
        "physiotherapy",
        "weeks",
    ),
    Condition(
        "hypertension",
        ("high blood pressure readings at home", "raised readings on a home monitor"),
        ("Heart sounds normal.", "No ankle swelling."),
        {
            "amlodipine": ("5 mg", "10 mg"),
            "ramipril": ("2.5 mg", "5 mg"),
            "losartan": ("50 mg", "100 mg"),
        },
        ("cut down on salt", "walk every day"),
        "cardiology",
        "long",
        youngest=35,
        high_pressure=True,
        blood_test=True,
    ),
    Condition(
        "type 2 diabetes",
        ("thirst and tiredness", "raised sugar readings"),
        ("Foot pulses and feeling normal.", "Weight up slightly since last year."),
        {
            "metformin": ("500 mg", "1000 mg"),
            "gliclazide": ("40 mg", "80 mg"),
            "sitagliptin": ("50 mg", "100 mg"),
        },
        ("see the dietitian", "walk every day"),
        "the diabetes team",
        "long",
        youngest=35,
        blood_test=True,
    ),
    Condition(
        "asthma",
        ("wheeze and a night cough", "chest tightness on exercise"),
        ("Quiet wheeze at both bases.", "Peak flow a little below usual."),
        {"budesonide": ("100 micrograms", "200 micrograms"), "montelukast": ("10 mg",)},
        ("avoid dust and smoke", "keep a peak flow diary"),
        "the asthma nurse",
        "weeks",
    ),
    Condition(
        "acid reflux",
        ("burning behind the breastbone", "heartburn after meals"),
        ("Abdomen soft with no mass.", "Mild tenderness in the upper abdomen."),
        {"omeprazole": ("20 mg", "40 mg"), "famotidine": ("20 mg", "40 mg")},
        ("avoid late meals", "raise the head of the bed"),
        "gastroenterology",
        "weeks",
    ),
    Condition(
        "gout",
        ("a hot painful big toe", "sudden pain and swelling of the foot"),
        ("Joint red, warm and very tender.", "Swollen joint, skin unbroken."),
        {"colchicine": ("500 micrograms",), "naproxen": ("250 mg", "500 mg")},
        ("rest the foot", "drink plenty of water"),
        "rheumatology",
        "acute",
        youngest=35,
        blood_test=True,
    ),
    Condition(
        "knee osteoarthritis",
        ("aching knees on the stairs", "knee pain and morning stiffness"),
        ("Both knees creak, full bend.", "Small cool swelling of the knee."),
        {
            "paracetamol": ("500 mg", "1000 mg"),
            "ibuprofen": ("200 mg", "400 mg"),
            "naproxen": ("250 mg", "500 mg"),
        },
        ("do strengthening exercises", "lose some weight"),
        "physiotherapy",
        "long",
        youngest=45,
    ),
    Condition(
        "low back pain",
        ("an aching lower back", "back pain after lifting"),
        ("Bending limited by pain.", "Leg raise and reflexes normal."),
        {"ibuprofen": ("200 mg", "400 mg"), "naproxen": ("250 mg", "500 mg")},
        ("stay active", "lift with bent knees"),
        "physiotherapy",
        "weeks",
    ),
    Condition(
        "urinary infection",
        ("burning on passing urine", "frequent and painful urination"),
        ("Urine test positive.", "Lower abdomen slightly tender."),
        {
            "nitrofurantoin": ("50 mg", "100 mg"),
            "trimethoprim": ("200 mg",),
            "cefalexin": ("250 mg", "500 mg"),
        },
        ("drink plenty of water", "bring a urine sample"),
        "urology",
        "acute",
        feverish=True,
    ),
    Condition(
        "tonsillitis",
        ("a sore throat and painful swallowing", "a sore throat with swollen glands"),
        ("Tonsils red and large.", "Tender glands in the neck."),
        {"amoxicillin": ("250 mg", "500 mg"), "clarithromycin": ("250 mg", "500 mg")},
        ("rest and drink fluids", "gargle with salt water"),
        "the ear clinic",
        "acute",
        feverish=True,
    ),
    Condition(
        "chest infection",
        ("a cough with green phlegm", "a cough and mild breathlessness"),
        ("Crackles at one base.", "Coarse breath sounds, no wheeze."),
        {
            "amoxicillin": ("250 mg", "500 mg"),
            "doxycycline": ("100 mg", "200 mg"),
            "clarithromycin": ("250 mg", "500 mg"),
        },
        ("rest and drink fluids", "stop smoking"),
        "the chest clinic",
        "acute",
        feverish=True,
    ),
    Condition(
        "hay fever",
        ("sneezing and itchy eyes", "a runny nose outdoors"),
        ("Eyes pink, nose lining pale.", "Chest clear, nose blocked."),
        {
            "cetirizine": ("5 mg", "10 mg"),
            "loratadine": ("10 mg",),
            "fexofenadine": ("120 mg", "180 mg"),
        },
        ("keep windows closed", "rinse the nose with salt water"),
        "the allergy clinic",
        "weeks",
    ),
    Condition(
        "depression",
        ("low mood and poor sleep", "loss of interest and tiredness"),
        ("Quiet but good eye contact.", "Speech slow, no thoughts of self-harm."),
        {
            "sertraline": ("50 mg", "100 mg"),
            "citalopram": ("10 mg", "20 mg"),
            "mirtazapine": ("15 mg", "30 mg"),
        },
        ("try talking therapy", "walk every day"),
        "the counselling service",
        "long",
    ),
    Condition(
        "anxiety",
        ("worry and a racing heart", "sudden spells of fear"),
        ("Restless, heart sounds normal.", "Hands slightly shaky."),
        {
            "sertraline": ("25 mg", "50 mg"),
            "propranolol": ("10 mg", "40 mg"),
            "citalopram": ("10 mg", "20 mg"),
        },
        ("practise slow breathing", "cut down on coffee"),
        "the counselling service",
        "long",
    ),
    Condition(
        "underactive thyroid",
        ("tiredness and feeling cold", "dry skin and weight gain"),
        ("Thyroid not enlarged.", "Skin dry, reflexes slow."),
        {"levothyroxine": ("25 micrograms", "50 micrograms", "75 micrograms", "100 micrograms")},
        ("repeat the blood test", "take tablets before food"),
        "the hormone clinic",
        "long",
        blood_test=True,
    ),
    Condition(
        "high cholesterol",
        ("raised cholesterol on repeat tests", "high cholesterol results"),
        ("Heart sounds normal.", "No deposits around the eyes."),
        {"atorvastatin": ("20 mg", "40 mg"), "simvastatin": ("20 mg", "40 mg")},
        ("eat less fatty food", "see the dietitian"),
        "the lipid clinic",
        "long",
        youngest=35,
        blood_test=True,
    ),
    Condition(
        "atrial fibrillation",
        ("a fluttering heartbeat", "palpitations and tiredness"),
        ("Pulse irregular, lungs clear.", "Heart tracing irregular."),
        {"bisoprolol": ("2.5 mg", "5 mg"), "diltiazem": ("120 mg", "180 mg")},
        ("cut down on alcohol", "keep a pulse diary"),
        "cardiology",
        "weeks",
        youngest=50,
        blood_test=True,
    ),
    Condition(
        "heart failure",
        ("swollen ankles and breathlessness", "breathlessness on lying flat"),
        ("Fine crackles at both bases.", "Pitting swelling of both ankles."),
        {"furosemide": ("20 mg", "40 mg"), "bumetanide": ("1 mg", "2 mg")},
        ("weigh daily", "cut down on salt"),
        "cardiology",
        "weeks",
        youngest=55,
        blood_test=True,
    ),
    Condition(
        "constipation",
        ("hard infrequent stools", "bloating and straining"),
        ("Abdomen soft and full.", "No mass felt."),
        {"senna": ("7.5 mg", "15 mg"), "bisacodyl": ("5 mg", "10 mg")},
        ("eat more fibre", "drink plenty of water"),
        "gastroenterology",
        "weeks",
    ),
    Condition(
        "shingles",
        ("a painful blistering rash", "burning pain and then a rash"),
        ("Blisters in a band on one side.", "Crusting rash on one side of the chest."),
        {"aciclovir": ("800 mg",), "valaciclovir": ("1000 mg",)},
        ("keep the rash covered", "rest at home"),
        "dermatology",
        "acute",
        youngest=40,
    ),
    Condition(
        "cellulitis",
        ("a red hot lower leg", "spreading redness of the shin"),
        ("Warm red skin with a clear edge.", "Skin swollen, no open wound."),
        {
            "flucloxacillin": ("500 mg", "1000 mg"),
            "doxycycline": ("100 mg", "200 mg"),
            "clarithromycin": ("250 mg", "500 mg"),
        },
        (),
        "the day unit",
        "acute",
        feverish=True,
    ),
    Condition(
        "sciatica",
        ("pain from the back to the foot", "shooting leg pain"),
        ("Leg raise painful on one side.", "Power and feeling in the leg normal."),
        {"naproxen": ("250 mg", "500 mg"), "amitriptyline": ("10 mg", "25 mg")},
        ("do stretching exercises", "stay active"),
        "physiotherapy",
        "weeks",
    ),
    Condition(
        "overactive bladder",
        ("sudden urges to pass urine", "getting up often at night to pass urine"),
        ("Urine test clear.", "Abdomen normal, bladder not felt."),
        {"solifenacin": ("5 mg", "10 mg"), "mirabegron": ("25 mg", "50 mg")},
        ("do bladder training", "cut down on coffee"),
        "urology",
        "long",
        youngest=40,
    ),
    Condition(
        "vertigo",
        ("spinning on turning in bed", "dizzy spells with nausea"),
        ("Head turning brings on dizziness.", "Walking and hearing normal."),
        {"prochlorperazine": ("5 mg", "10 mg"), "betahistine": ("8 mg", "16 mg")},
        ("do balance exercises", "avoid driving"),
        "the ear clinic",
        "acute",
    ),
)

DURATIONS: Mapping[str, tuple[str, ...]] = {
    "acute": ("2 days", "3 days", "4 days", "5 days", "6 days", "10 days", "2 weeks"),
    "weeks": ("2 weeks", "3 weeks", "4 weeks", "5 weeks", "6 weeks", "8 weeks", "3 months"),
    "long": ("6 weeks", "2 months", "3 months", "4 months", "5 months", "6 months", "9 months"),
}
REVIEWS: Mapping[str, tuple[str, ...]] = {
    "acute": ("2 days", "3 days", "5 days", "7 days", "10 days"),
    "weeks": ("10 days", "2 weeks", "3 weeks", "4 weeks", "6 weeks"),
    "long": ("2 weeks", "4 weeks", "6 weeks", "2 months", "3 months"),
}
HOLIDAYS = ("5 days", "6 days", "10 days", "2 weeks", "3 weeks")
PLAN_KINDS: Mapping[str, tuple[str, ...]] = {
    "acute": ("start", "start", "start", "switch", "advise", "refer"),
    "weeks": ("start", "start", "increase", "switch", "continue", "advise", "refer"),
    "long": ("start", "increase", "reduce", "switch", "continue", "advise", "refer"),
}
NUMBER_WORDS: Mapping[str, str] = {
    "2": "two", "3": "three", "4": "four", "5": "five", "6": "six", "7": "seven", "8": "eight",
    "9": "nine", "10": "ten",
}  # fmt: skip

CLINICS = ("Harbour Road Clinic", "Moor Lane Practice", "Saltmarsh Health Centre", "Upper Fold Surgery")
SURNAMES = (
    "Alder", "Brook", "Carden", "Dunmore", "Elwick", "Farrow", "Garrow", "Hollis", "Ingram", "Jessop",
    "Kestle", "Lamb", "Marlow", "Norrie", "Orme", "Penrow", "Quill", "Rudd", "Selwick", "Thorne",
)  # fmt: skip
JOBS = (
    "bus driver", "baker", "teacher", "gardener", "carpenter", "cleaner", "librarian", "cook",
    "bookkeeper", "postal clerk",
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Clinic notes: sentence patterns
# --------------------------------------------------------------------------------------------------

OPENINGS = (
    "{Title} {surname}, aged {age}, came in with {symptom} for {duration}.",
    "Seen today: {a} {age}-year-old {person} with {symptom} for {duration}.",
    "This {age}-year-old {person} reports {symptom} over the last {duration}.",
    "{Title} {surname} is {age} and describes {symptom}. The problem began {duration} ago.",
    "The patient is a {person} of {age} who has had {symptom} for about {duration}.",
    "For the past {duration} this {person}, aged {age}, has had {symptom}.",
    "Clinic visit by {Title} {surname}, {a} {age}-year-old {person}. Main concern is {symptom}, present"
    " for {duration}.",
)
DIAGNOSES = (
    "Impression: {condition}.",
    "Findings fit with {condition}.",
    "Working diagnosis is {condition}.",
    "Most likely {condition}.",
    "Assessed as {condition}.",
    "The picture is that of {condition}.",
)
VITALS = (
    "Blood pressure {systolic}/{diastolic}, pulse {pulse}, temperature {temperature}.",
    "Temperature {temperature}, pulse {pulse}, blood pressure {systolic}/{diastolic}.",
    "Pulse {pulse} and blood pressure {systolic}/{diastolic}.",
    "Observations: temperature {temperature}, pulse {pulse}.",
)
PLAN_NOTES: Mapping[str, tuple[str, ...]] = {
    "start": (
        "Started {drug} {dose} {taken}.",
        "Plan: {drug} {dose} {taken}.",
        "Prescribed {drug} {dose}, to be taken {taken}.",
        "We agreed to begin {drug} {dose} {taken}.",
    ),
    "increase": (
        "Already takes {drug} {other_dose}; this was increased to {dose} {taken}.",
        "The dose of {drug} was raised from {other_dose} to {dose} {taken}.",
        "On {drug} {other_dose} with some benefit, so went up to {dose} {taken}.",
    ),
    "reduce": (
        "Side effects on {drug} {other_dose}, so this was reduced to {dose} {taken}.",
        "The dose of {drug} was lowered from {other_dose} to {dose} {taken}.",
        "Finds {drug} {other_dose} too strong; agreed to go down to {dose} {taken}.",
    ),
    "switch": (
        "No benefit from {other_drug}, so changed to {drug} {dose} {taken}.",
        "Stopped {other_drug} and gave {drug} {dose} {taken} instead.",
        "Did not get on with {other_drug}. This was replaced by {drug} {dose} {taken}.",
    ),
    "continue": (
        "To carry on with {drug} {dose} {taken}.",
        "Settled on {drug} {dose} {taken}, no change made.",
        "Already takes {drug} {dose} {taken} and will stay on it.",
    ),
    "advise": (
        "No new tablets for now; advised to {advice}.",
        "Told to {advice} and given no new tablets.",
        "The plan is to {advice} first, without a new prescription.",
    ),
    "refer": (
        "Letter sent to {referral}.",
        "I have asked {referral} to see {him}.",
        "Referred to {referral} for an opinion.",
    ),
}
PLAN_SUMMARIES: Mapping[str, str] = {
    "start": "Started {drug} {dose}",
    "increase": "Increased {drug} to {dose}",
    "reduce": "Reduced {drug} to {dose}",
    "switch": "Switched from {other_drug} to {drug} {dose}",
    "continue": "Continued {drug} {dose}",
    "advise": "Advised to {advice}",
    "refer": "Referred to {referral}",
}
FOLLOW_UP_NOTES: Mapping[str, tuple[str, ...]] = {
    "review": (
        "Review in {interval}.",
        "Asked to come back in {interval}.",
        "We will meet again in {interval}.",
        "Next visit booked in {interval}.",
    ),
    "blood test": ("Blood test in {interval}.", "Bloods to be taken in {interval}."),
    "none": ("No further visit is planned.", "To call only if it gets worse."),
}
FOLLOW_UP_SUMMARIES: Mapping[str, str] = {
    "review": "review in {interval}",
    "blood test": "blood test in {interval}",
    "none": "no review planned",
}
# The two asides of a note come from two different groups.
ASIDES = (
    ("Works as a {job}.", "Has worked as a {job} for years.", "Helps out as a {job} at weekends."),
    ("Lives with {his} sister.", "Lives alone on the second floor.", "Shares a house with two friends."),
    ("Does not smoke and drinks little alcohol.", "Gave up smoking some years ago."),
    ("Walks the dog most mornings.", "Sings in a choir and sleeps well.", "Eats well and likes to swim."),
    ("No known allergies.", "Appendix removed as a teenager."),
    ("{His} mother had {other_illness}.", "No past history of {other_illness}."),
    ("Last seen here {other_duration} ago for a routine check.",),
    ("Back from a holiday of {holiday} by the sea.", "Has just spent {holiday} with a cousin."),
    ("Cares for a neighbour aged {other_age}.",),
)
# Illnesses an aside may name although the visit is about another one.
FAMILY_ILLNESSES = (
    "migraine", "hypertension", "type 2 diabetes", "asthma", "gout", "depression",
    "underactive thyroid", "high cholesterol", "atrial fibrillation", "heart failure",
)  # fmt: skip
# O opening, F finding, V vital signs, D diagnosis, P plan, R follow-up, A and B asides.
ORDERS = ("OFVADPRB", "OAFVDPR", "OAVFDBPR", "OBFVDPRA", "OFADPVRB", "ODFAVPR", "OVFDRPA", "ODPFVRAB")


@dataclass(frozen=True)
class Visit:
    """Facts of a note and its summary."""

    age: int
    woman: bool
    condition: Condition
    duration: str
    plan: str
    drug: str
    dose: str
    other_drug: str
    other_dose: str
    advice: str
    follow_up: str
    interval: str

    @property
    def combination(self) -> tuple[str, ...]:
        """The clinical facts without age and sex: a held-out visit shares them with no training visit."""
        return (self.condition.name, self.duration, plan_summary(self), self.follow_up, self.interval)


def plan_summary(visit: Visit) -> str:
    """Word the plan as the summary does."""
    return PLAN_SUMMARIES[visit.plan].format(
        drug=visit.drug,
        dose=visit.dose,
        other_drug=visit.other_drug,
        advice=visit.advice,
        referral=visit.condition.referral,
    )


def draw_medication(rng: random.Random, condition: Condition, plan: str) -> tuple[str, str, str, str, str]:
    """Draw (plan, drug, dose, other drug, other dose); a plan that does not fit becomes a start."""
    names = list(condition.medications)
    drug, other_drug = rng.sample(names, 2) if len(names) > 1 else (names[0], "")
    doses = condition.medications[drug]
    low = rng.randrange(len(doses) - 1) if len(doses) > 1 else 0
    if plan == "increase" and len(doses) > 1:
        return plan, drug, doses[low + 1], other_drug, doses[low]
    if plan == "reduce" and len(doses) > 1:
        return plan, drug, doses[low], other_drug, doses[low + 1]
    if plan == "continue" or (plan == "switch" and other_drug):
        return plan, drug, rng.choice(doses), other_drug, ""
    if plan == "refer" or (plan == "advise" and condition.advice):
        return plan, "", "", "", ""
    first_doses = doses[:-1] if condition.course == "long" and len(doses) > 1 else doses
    return "start", drug, rng.choice(first_doses), "", ""


def draw_visit(rng: random.Random) -> Visit:
    """Draw one visit; every fact is independent of the others except where medicine binds them."""
    condition = rng.choice(CONDITIONS)
    wanted_plan = rng.choice(PLAN_KINDS[condition.course])
    plan, drug, dose, other_drug, other_dose = draw_medication(rng, condition, wanted_plan)
    follow_ups = ["review", "review", "review"]
    if condition.blood_test:
        follow_ups += ["blood test"]
    if condition.course == "acute":
        follow_ups += ["none"]
    return Visit(
        age=rng.randint(condition.youngest, 89),
        woman=rng.random() < 0.5,
        condition=condition,
        duration=rng.choice(DURATIONS[condition.course]),
        plan=plan,
        drug=drug,
        dose=dose,
        other_drug=other_drug,
        other_dose=other_dose,
        advice=rng.choice(condition.advice) if plan == "advise" else "",
        follow_up=rng.choice(follow_ups),
        interval=rng.choice(REVIEWS[condition.course]),
    )


def spoken(rng: random.Random, duration: str) -> str:
    """Write the duration as the note does: now and then with the number as a word."""
    number, unit = duration.split(" ")
    return f"{NUMBER_WORDS[number]} {unit}" if rng.random() < 0.2 else duration


def vital_signs(rng: random.Random, visit: Visit) -> dict[str, str]:
    """Draw vital signs that fit the condition."""
    raised = visit.condition.high_pressure and visit.plan not in ("continue", "reduce")
    tenths = rng.randint(375, 384) if visit.condition.feverish else rng.randint(363, 370)
    return {
        "systolic": str(rng.randrange(150, 172, 2) if raised else rng.randrange(112, 138, 2)),
        "diastolic": str(rng.randrange(92, 102, 2) if raised else rng.randrange(66, 86, 2)),
        "pulse": str(rng.randrange(62, 96, 2)),
        "temperature": f"{tenths / 10:.1f}",
    }


def note_slots(rng: random.Random, visit: Visit) -> dict[str, str]:
    """Return all words a sentence pattern of the note may ask for, the misleading ones of asides included."""
    illnesses = [illness for illness in FAMILY_ILLNESSES if illness != visit.condition.name]
    lengths = sorted({length for choices in DURATIONS.values() for length in choices} - {visit.duration})
    return {
        "Title": rng.choice(("Mrs", "Ms")) if visit.woman else "Mr",
        "surname": rng.choice(SURNAMES),
        "age": str(visit.age),
        "a": "an" if 80 <= visit.age <= 89 else "a",
        "person": "woman" if visit.woman else "man",
        "him": "her" if visit.woman else "him",
        "his": "her" if visit.woman else "his",
        "His": "Her" if visit.woman else "His",
        "condition": visit.condition.name,
        "symptom": rng.choice(visit.condition.symptoms),
        "duration": spoken(rng, visit.duration),
        "drug": visit.drug,
        "dose": visit.dose,
        "taken": HOW_TAKEN.get(visit.drug, ""),
        "other_drug": visit.other_drug,
        "other_dose": visit.other_dose,
        "advice": visit.advice,
        "referral": visit.condition.referral,
        "interval": spoken(rng, visit.interval),
        "job": rng.choice(JOBS),
        "other_illness": rng.choice(illnesses),
        "other_duration": rng.choice(lengths),
        "holiday": rng.choice(HOLIDAYS),
        "other_age": str(rng.randint(20, 89)),
        **vital_signs(rng, visit),
    }


def write_note(rng: random.Random, visit: Visit) -> str:
    """Word the note: a pattern for each sentence, an order of sentences, one or two asides."""
    first_aside, second_aside = (rng.choice(group) for group in rng.sample(ASIDES, 2))
    patterns = {
        "O": rng.choice(OPENINGS),
        "F": rng.choice(visit.condition.findings),
        "V": rng.choice(VITALS),
        "D": rng.choice(DIAGNOSES),
        "P": rng.choice(PLAN_NOTES[visit.plan]),
        "R": rng.choice(FOLLOW_UP_NOTES[visit.follow_up]),
        "A": first_aside,
        "B": second_aside,
    }
    slots = note_slots(rng, visit)
    return " ".join(patterns[letter] for letter in rng.choice(ORDERS)).format(**slots)


def write_summary(visit: Visit) -> str:
    """Word the summary in the house style of the clinics."""
    person = "woman" if visit.woman else "man"
    follow_up = FOLLOW_UP_SUMMARIES[visit.follow_up].format(interval=visit.interval)
    return (
        f"{visit.age}-year-old {person} with {visit.condition.name} for {visit.duration}. "
        f"{plan_summary(visit)}; {follow_up}."
    )


def make_clinic_notes(seed: str) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows); no note and no combination of facts is in both."""
    rng = random.Random(seed)
    heldout: list[Row] = []
    train: list[Row] = []
    notes: set[str] = set()
    heldout_combinations: set[tuple[str, ...]] = set()
    while len(train) < TRAIN_NOTES:
        visit = draw_visit(rng)
        note = write_note(rng, visit)
        wanted = NOTE_WORDS[0] <= len(note.split()) <= NOTE_WORDS[1]
        if not wanted or note in notes or visit.combination in heldout_combinations:
            continue
        notes.add(note)
        rows = heldout if len(heldout) < HELDOUT_NOTES else train
        if rows is heldout:
            heldout_combinations.add(visit.combination)
        rows.append(
            {
                "visit_id": f"V{len(notes):05d}",
                "clinic": rng.choice(CLINICS),
                "note": note,
                "short_summary": write_summary(visit),
            }
        )
    return train, heldout


# --------------------------------------------------------------------------------------------------
# Question answering over short passages (clinic_qa.json)
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topic:
    """A kind of passage: patterns, the words for each slot, and questions whose answer is one slot."""

    title: str
    patterns: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]
    questions: Mapping[str, tuple[str, ...]]


HOURS = ("7:30", "8:00", "8:15", "8:30", "9:00", "9:15")
LATE_HOURS = ("16:30", "17:00", "17:30", "18:15", "19:00", "20:30")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
PEOPLE = (
    "Ada Penrow", "Bruno Selwick", "Clara Orme", "Dario Farrow", "Edith Quill", "Felix Garrow",
    "Greta Hollis", "Hugo Carden", "Ines Norrie", "Jonas Elwick", "Kira Dunmore", "Leo Thorne",
)  # fmt: skip

TOPICS: tuple[Topic, ...] = (
    Topic(
        "Clinic leaflets",
        (
            "{clinic} is open from {opens} to {closes} on weekdays. Blood samples are taken on {day} "
            "mornings in {room}; please drink water beforehand. Results are usually ready within {results}. "
            "To cancel a visit, call the front desk at least {cancel} before it, so that someone else can "
            "have the time.",
            "Welcome to {clinic}. Our doors open at {opens} and close at {closes}, except at weekends. If "
            "you need a blood sample, come to {room} on a {day}. We will write to you with the result "
            "within {results}. Visits can be moved free of charge until {cancel} before they start.",
        ),
        {
            "clinic": (*CLINICS, "Millbank Family Clinic", "Larch Street Practice", "Eastwater Clinic"),
            "opens": HOURS,
            "closes": LATE_HOURS,
            "day": DAYS[:5],
            "room": ("room 3", "room 7", "the annexe", "the blue room", "the first-floor lab"),
            "results": ("two working days", "three working days", "one week", "five days"),
            "cancel": ("24 hours", "48 hours", "12 hours", "six hours"),
        },
        {
            "opens": ("When does {clinic} open?", "At what time do the doors of {clinic} open?"),
            "room": ("Where are blood samples taken?", "Where should I go for a blood sample?"),
            "day": ("On which day are blood samples taken?", "Which day is for blood samples?"),
            "results": ("How soon are results ready?", "How long do results take?"),
        },
    ),
    Topic(
        "Medicine leaflets",
        (
            "{medicine} is a {form} for {use}. Adults take {amount} {when}. Store it {store} and out of the "
            "reach of children. The most common side effect is {effect}, which usually passes within a few "
            "days. Do not take {medicine} together with {avoid} unless your doctor has told you to.",
            "Your doctor has given you {medicine}, a {form} used for {use}. The usual amount for an adult "
            "is {amount}, taken {when}. Some people notice {effect} at first. Keep the pack {store}. While "
            "you are using it, stay away from {avoid}, which can change how well it works.",
        ),
        {
            "medicine": (
                "Calmorin", "Veltasol", "Pindrazine", "Orbexal", "Tarsinol", "Luminact", "Quendol",
                "Sorvital",
                "Brisadon", "Haldrene",
            ),
            "form": ("syrup", "tablet", "powder", "capsule"),
            "use": ("mild heartburn", "a dry cough", "motion sickness", "stiff joints", "seasonal sneezing"),
            "amount": ("one dose", "two doses", "half a dose"),
            "when": ("after breakfast", "before bed", "with the midday meal", "every eight hours"),
            "store": ("in a refrigerator", "below 25 degrees", "in a dry cupboard", "in its own box"),
            "effect": ("a dry mouth", "mild drowsiness", "a slight headache", "an upset stomach"),
            "avoid": ("grapefruit juice", "alcohol", "strong coffee", "liquorice"),
        },
        {
            "use": ("What is {medicine} used for?", "What does {medicine} treat?"),
            "when": ("When is {medicine} taken?", "At what point of the day do I take {medicine}?"),
            "effect": ("What side effect is common?", "What may people notice with {medicine}?"),
            "avoid": (
                "What should be avoided with {medicine}?", "What must not be combined with {medicine}?",
            ),
        },
    ),
    Topic(
        "Service contracts",
        (
            "This agreement is made between {client} and {supplier}. It begins on {start} and runs for "
            "{term}. The supplier will {service} for a fee of {fee} per month, payable within {payment} of "
            "the invoice. Either party may end the agreement by giving written notice of {notice}.",
            "{supplier} agrees to {service} for {client} from {start}. The first term is {term}. {client} "
            "pays {fee} each month, no later than {payment} after receipt of an invoice. The agreement may "
            "be ended by either side in writing, with a notice period of {notice}.",
        ),
        {
            "client": (
                "Bellgate Foods", "Corran Textiles", "Dray Hill School", "Fennel and Rye", "Osmer Printing",
                "Tidewell Hotels", "Wick Farm Dairy", "Yarrow Opticians",
            ),
            "supplier": (
                "Amberly Services", "Kiln Bridge Systems", "Northmere Cleaning", "Pellow Maintenance",
                "Rowan Gate Security", "Stannick Logistics",
            ),
            "start": ("1 March", "15 April", "1 June", "10 September", "1 October", "2 January"),
            "term": ("12 months", "18 months", "24 months", "36 months"),
            "service": (
                "clean the offices", "service the lifts", "guard the warehouse", "maintain the heating",
                "collect the recycling",
            ),
            "fee": ("420 crowns", "675 crowns", "980 crowns", "1,250 crowns", "2,300 crowns"),
            "payment": ("14 days", "21 days", "30 days", "45 days"),
            "notice": ("one month", "six weeks", "two months", "90 days"),
        },
        {
            "supplier": ("Who is the supplier?", "Which company provides the service to {client}?"),
            "start": (
                "When does the agreement begin?", "From which date does {supplier} provide the service?",
            ),
            "fee": ("What is the monthly fee?", "How much does {client} pay each month?"),
            "notice": ("How much notice is needed to end the agreement?", "What is the notice period?"),
        },
    ),
    Topic(
        "Device support notes",
        (
            "Model {model}: some customers see the code {code} when {moment}. The cause is {cause}. To "
            "clear it, {fix}, then wait {wait} before switching the device on again. If the code returns, "
            "ask {team} for a replacement; the guarantee covers this for {guarantee}.",
            "Known issue with the {model}. The display may show {code} when {moment}. We traced this to "
            "{cause}. Customers should {fix} and leave the device off for {wait}. Cases that are still open "
            "afterwards go to {team}. Repairs are free during the first {guarantee}.",
        ),
        {
            "model": ("Tavi 200", "Tavi 310", "Orlo Mini", "Orlo Max", "Brindle X", "Brindle S", "Kestor 5"),
            "code": ("E14", "E27", "F03", "F19", "H08", "L42"),
            "moment": ("the lid is opened", "the tank is full", "it warms up", "the battery runs low"),
            "cause": ("a loose cable", "dust on the sensor", "a worn seal", "an outdated program"),
            "fix": ("unplug the device", "press both buttons at once", "wipe the sensor", "refit the cover"),
            "wait": ("one minute", "five minutes", "half an hour", "ten seconds"),
            "team": ("the repair desk", "the second-line team", "the parts store", "the Hollin workshop"),
            "guarantee": ("two years", "three years", "eighteen months", "five years"),
        },
        {
            "code": ("Which code does the {model} show?", "What appears on the display?"),
            "cause": ("What causes the problem?", "What is behind the code {code}?"),
            "fix": ("What should customers do?", "How is the code {code} cleared?"),
            "wait": ("How long should the device stay off?", "How long is the wait?"),
        },
    ),
    Topic(
        "Library notices",
        (
            "At {library}, books may be borrowed for {loan} and renewed {renew}. Late items cost {fine} per "
            "day. The reading group led by {leader} meets every {day} on {place}. New members need {paper} "
            "and receive a card at once.",
            "{library} lends books for {loan}; a loan can be renewed {renew} if nobody is waiting. We "
            "charge {fine} a day for late items. Every {day}, {leader} hosts a reading group on {place}. To "
            "join the library, bring {paper} to the desk.",
        ),
        {
            "library": ("Quayside Library", "Elmet Library", "the Weavers Library", "Tarn Library"),
            "loan": ("three weeks", "four weeks", "ten days", "one month"),
            "renew": ("once", "twice", "up to three times", "as often as needed"),
            "fine": ("10 cents", "15 cents", "25 cents", "40 cents"),
            "leader": PEOPLE,
            "day": DAYS,
            "place": ("the ground floor", "the top floor", "the terrace", "the gallery level"),
            "paper": ("a proof of address", "a recent photograph", "a school card", "a letter from home"),
        },
        {
            "loan": ("How long may books be borrowed?", "What is the loan period?"),
            "fine": ("How much does a late item cost per day?", "What is the charge for a late item?"),
            "leader": ("Who leads the reading group?", "Who runs the group that meets every {day}?"),
            "paper": ("What do new members need?", "What must I bring to join the library?"),
        },
    ),
    Topic(
        "Ferry timetables",
        (
            "The ferry {ship} sails to {island} from {pier}. The first boat leaves at {first} and the last "
            "one returns at {last}. The crossing takes {minutes}. An adult ticket costs {fare}; bicycles "
            "travel free. In rough weather, sailings may be cancelled; look for the {flag} at the harbour "
            "office.",
            "From {pier} you can reach {island} in {minutes} on the {ship}. Boats run from {first}, and the "
            "last return is at {last}. Tickets are sold on board for {fare}. A {flag} at the harbour office "
            "means that no boats will sail that day because of the weather.",
        ),
        {
            "ship": ("Marigold", "Sea Lark", "Northern Tern", "Old Hannah", "Blue Petrel"),
            "island": ("Farra", "Little Sund", "Greyholm", "Skell", "Inner Vay", "Torsey"),
            "pier": ("the stone pier", "the east quay", "Lamp Quay", "the fish market"),
            "first": HOURS,
            "last": LATE_HOURS,
            "minutes": ("20 minutes", "35 minutes", "50 minutes", "75 minutes"),
            "fare": ("4 crowns", "6 crowns", "9 crowns", "12 crowns"),
            "flag": ("red flag", "black flag", "yellow lamp", "striped flag"),
        },
        {
            "pier": ("Where does the {ship} leave from?", "From where do boats sail to {island}?"),
            "minutes": ("How long is the crossing to {island}?", "How long does the {ship} take?"),
            "fare": ("How much is a ticket?", "What does the trip to {island} cost?"),
            "last": ("When does the last boat return?", "At what time is the last return?"),
        },
    ),
    Topic(
        "Museum labels",
        (
            "This {object} was found by {finder} in {year} while digging {site}. It is made of {material} "
            "and is thought to be {old} old. The museum bought it for {price} and showed it for the first "
            "time in {hall}. The mark on its base belongs to a workshop that is otherwise unknown.",
            "{finder} came across this {object} {site} in {year}. Tests show that the {material} was worked "
            "{old} ago, probably nearby. It reached our collection for {price} after a public appeal and "
            "has stood in {hall} ever since, beside the map that the finder drew.",
        ),
        {
            "object": ("drinking bowl", "brooch", "oil lamp", "game board", "comb", "signal horn"),
            "finder": PEOPLE,
            "year": ("1871", "1889", "1904", "1926", "1938", "1957", "1963"),
            "site": ("under a mill", "beside a dry well", "below the old bridge", "in a peat bog"),
            "material": ("bronze", "walrus ivory", "green glass", "birch wood", "black stone"),
            "old": ("600 years", "900 years", "1,200 years", "2,000 years"),
            "price": ("80 crowns", "150 crowns", "310 crowns", "1,000 crowns"),
            "hall": ("the north hall", "the round room", "the long gallery", "the treasury"),
        },
        {
            "finder": ("Who found the {object}?", "By whom was the {object} discovered?"),
            "year": ("In which year was the {object} found?", "When was the {object} discovered?"),
            "material": ("What is the {object} made of?", "Which material was used for the {object}?"),
            "hall": ("Where is the {object} shown?", "In which part of the museum is the {object}?"),
        },
    ),
    Topic(
        "Garden guides",
        (
            "Sow {plant} in {sow}, about {deep} deep, and leave {gap} between the plants. They like {soil} "
            "and need water {water}. The harvest starts in {harvest}. The main pest is {pest}; a row of "
            "{helper} nearby helps to keep it away.",
            "{plant} do best in {soil}. Put the seed {deep} deep in {sow} and thin the row to {gap}. Water "
            "{water}, more often in dry spells. Watch out for {pest}, which can be kept off by growing "
            "{helper} close by. You can expect the first harvest in {harvest}.",
        ),
        {
            "plant": ("broad beans", "carrots", "beetroots", "parsnips", "radishes", "turnips", "leeks"),
            "sow": ("early March", "late March", "April", "early May"),
            "deep": ("1 centimetre", "2 centimetres", "3 centimetres"),
            "gap": ("5 centimetres", "10 centimetres", "15 centimetres", "20 centimetres"),
            "soil": ("light sandy soil", "rich damp soil", "deep loose soil", "heavy clay"),
            "water": ("twice a week", "every evening", "once a week", "every other day"),
            "harvest": ("June", "early July", "August", "September"),
            "pest": ("the bean aphid", "the root fly", "the flea beetle", "the grey slug"),
            "helper": ("marigolds", "onions", "mint", "nasturtiums"),
        },
        {
            "sow": ("When is the time to sow?", "When should the seed go into the ground?"),
            "gap": ("How much room does each plant need?", "How far apart should the plants be?"),
            "soil": ("What kind of soil suits the plants?", "Which soil is best?"),
            "helper": ("What can be grown nearby against pests?", "Which companion plant keeps pests away?"),
        },
    ),
)  # fmt: skip


def fill(pattern: str, slots: Mapping[str, str]) -> tuple[str, dict[str, int]]:
    """Fill the slots of a pattern; also return at which character each slot first begins."""
    text = ""
    starts: dict[str, int] = {}
    for literal, name, _, _ in string.Formatter().parse(pattern):
        text += literal
        if name is not None:
            starts.setdefault(name, len(text))
            text += slots[name]
    return text, starts


def capitalised(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def make_paragraph(rng: random.Random, topic: Topic, first_id: int) -> dict[str, object]:
    """One passage with a question for each askable slot; every answer occurs once in the passage."""
    while True:
        slots = {name: rng.choice(words) for name, words in topic.words.items()}
        context, starts = fill(rng.choice(topic.patterns), slots)
        if all(context.count(slots[name]) == 1 for name in topic.questions):
            break
    questions = [
        {
            "id": f"q{first_id + number:04d}",
            "question": rng.choice(wordings).format(**slots),
            "answers": [{"text": slots[name], "answer_start": starts[name]}],
        }
        for number, (name, wordings) in enumerate(topic.questions.items())
    ]
    return {"context": capitalised(context), "qas": questions}


def make_clinic_qa(seed: str) -> dict[str, object]:
    """Return the nested question-answering data: topics, passages, questions, answers with offsets."""
    rng = random.Random(seed)
    data: list[dict[str, object]] = []
    next_id = 1
    for topic in TOPICS:
        paragraphs: list[dict[str, object]] = []
        contexts: set[object] = set()
        while len(paragraphs) < QA_PARAGRAPHS_PER_TOPIC:
            paragraph = make_paragraph(rng, topic, next_id)
            if paragraph["context"] not in contexts:
                contexts.add(paragraph["context"])
                paragraphs.append(paragraph)
                next_id += len(topic.questions)
        data.append({"title": topic.title, "paragraphs": paragraphs})
    return {"version": "gptj-ft examples 1", "data": data}


# --------------------------------------------------------------------------------------------------
# Flat question answering (support_qa.jsonl)
# --------------------------------------------------------------------------------------------------

TICKETS = (
    "Ticket from {name}: the {product} {fault}. It began {since}. We checked the order, {order}, and found "
    "that {cause}. The customer was told to {step}. If that does not help, we will {remedy} within {delay}. "
    "The customer prefers to be reached {contact}.",
    "{name} wrote that the {product} {fault}; this began {since}. Order number {order}. Our bench test "
    "shows that {cause}. First step: {step}. Otherwise we promised to {remedy}, which takes {delay}. Please "
    "reply {contact}.",
    "Order {order}, {product}. According to {name}, it {fault}, and this began {since}. Reason found: "
    "{cause}. We asked the customer to {step} and offered to {remedy} if the fault comes back. That would "
    "take {delay}. Please answer {contact}.",
)
TICKET_WORDS: Mapping[str, tuple[str, ...]] = {
    "name": PEOPLE,
    "product": (
        "kettle", "desk lamp", "water pump", "hand mixer", "bicycle light", "wall clock", "air filter",
    ),
    "fault": ("makes a grinding noise", "switches itself off", "will not start", "gets too warm", "flickers"),
    "since": ("last Friday", "on the first day", "yesterday", "after a move to a new flat", "in the spring"),
    "cause": (
        "the switch was fitted upside down", "a screw had come loose", "the wrong fuse was supplied",
        "the filter was blocked", "the spring had lost its tension",
    ),
    "step": (
        "tighten the four screws", "replace the fuse", "clean the filter", "hold the reset key down",
        "charge it overnight",
    ),
    "remedy": ("send a new one", "refund the price", "repair it free of charge", "send a technician"),
    "delay": ("three working days", "one week", "48 hours", "ten days"),
    "contact": ("by letter", "by e-mail", "by telephone after lunch", "through the shop"),
}  # fmt: skip
TICKET_QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "order": ("What is the order number?", "Which order is this about?"),
    "cause": ("What was found to be the reason?", "Why does the {product} fail?"),
    "step": ("What should I try first?", "What is the first step?"),
    "remedy": (
        "What will you do if the first step does not help?",
        "What do you offer if the fault remains?",
    ),
    "delay": ("How long would that take?", "How long do I have to wait for the remedy?"),
    "contact": ("How should the customer be contacted?", "In which way is a reply wanted?"),
}


def make_support_qa(seed: str) -> list[Row]:
    """Return flat rows: a ticket, a question about it and the span of the ticket that answers it."""
    rng = random.Random(seed)
    rows: list[Row] = []
    asked = list(TICKET_QUESTIONS)
    while len(rows) < SUPPORT_ROWS:
        slots = {name: rng.choice(words) for name, words in TICKET_WORDS.items()}
        slots["order"] = f"{rng.choice('BDKT')}-{rng.randint(1000, 9999)}"
        ticket, _ = fill(rng.choice(TICKETS), slots)
        name = asked[len(rows) % len(asked)]
        question = rng.choice(TICKET_QUESTIONS[name]).format(**slots)
        if ticket.count(slots[name]) == 1:
            rows.append({"ticket": ticket, "customer_question": question, "reply": slots[name]})
    return rows


# --------------------------------------------------------------------------------------------------
# Plain text (field_notes.txt)
# --------------------------------------------------------------------------------------------------

FIELD_SENTENCES: tuple[tuple[str, ...], ...] = (
    (
        "We reached {place} {early}, with {weather} and {wind}.",
        "{Early} at {place}: {weather}, {wind}.",
        "Walked from the hut to {place} {early}. There was {weather} and {wind}.",
    ),
    (
        "{Number} {birds} were {doing} {where}, and a single {bird} kept to itself further off.",
        "The first birds were {number} {birds}, {doing} {where}.",
        "Counted {number} {birds} {doing} {where} before they noticed us.",
    ),
    (
        "The {plant} is {stage} now, about {days} {than} last year.",
        "Along the path the {plant} is {stage}, {days} {than} in our last record.",
        "Found {plant} {stage} on the {side} bank, where there was none before.",
    ),
    (
        "Tracks of a {mammal} crossed the {ground} and ended at the water.",
        "A {mammal} watched us from the {side} bank for a minute and then slipped away.",
        "No sign of the {mammal} this time, although the {ground} would have shown its tracks.",
    ),
    (
        "Water level at the post was {level} centimetres, {trend}.",
        "The gauge read {level} centimetres, {trend}, and the water was {clear}.",
        "The stream was {clear} and stood at {level} centimetres.",
    ),
    (
        "{Person} drew a sketch of the {side} bank and will add it to the map.",
        "{Person} repaired the marker and wrote the date on it.",
        "{Person} thinks that the {birds} will move on within {days}.",
        "Next time we should bring a longer rope and start {early}.",
        "We left {later}, tired and content.",
    ),
)
FIELD_WORDS: Mapping[str, tuple[str, ...]] = {
    "place": (
        "Sedge Pool", "the Long Reedbed", "Cold Ford", "Alder Carr", "the Upper Weir", "Gull Bank",
        "Ash Hollow",
        "the Salt Steps",
    ),
    "early": ("shortly before sunrise", "just after dawn", "in the first light", "early in the morning"),
    "later": ("around noon", "when the rain set in", "before the tide turned", "at dusk"),
    "weather": ("thin fog", "a clear sky", "low cloud", "light rain", "a hard frost", "warm haze"),
    "wind": (
        "no wind at all", "a light wind from the west", "a cold wind from the north", "gusts from the sea",
    ),
    "number": ("two", "three", "five", "six", "nine", "eleven", "fourteen", "about twenty"),
    "birds": ("herons", "lapwings", "teal", "curlews", "reed buntings", "snipe", "swallows", "redshanks"),
    "bird": ("kingfisher", "grey wagtail", "marsh harrier", "little grebe", "dunlin"),
    "doing": ("feeding", "resting", "calling loudly", "circling", "preening"),
    "where": (
        "on the mud", "over the far field", "along the ditch", "by the sluice", "at the edge of the ice",
    ),
    "plant": ("yellow flag", "marsh marigold", "water mint", "meadowsweet", "bogbean", "sea lavender"),
    "stage": ("in bud", "in full flower", "setting seed", "just coming through"),
    "days": ("four days", "a week", "ten days", "two weeks"),
    "than": ("earlier than", "later than"),
    "side": ("north", "south", "east", "west"),
    "mammal": ("fox", "water vole", "roe deer", "stoat", "hare", "badger"),
    "ground": ("soft mud", "wet sand", "thin snow", "sandy path"),
    "level": ("38", "41", "47", "52", "56", "63", "70"),
    "trend": ("falling slowly", "rising since yesterday", "unchanged", "a little above average"),
    "clear": ("clear to the bottom", "brown with peat", "cloudy after the rain", "still and dark"),
    "Person": ("Ines", "Hugo", "Clara", "Jonas", "Edith", "Bruno"),
}  # fmt: skip


def make_field_notes(seed: str) -> list[str]:
    """Return paragraphs of plain text: an opening, then four or five observations in varying order."""
    rng = random.Random(seed)
    paragraphs: list[str] = []
    for _ in range(FIELD_PARAGRAPHS):
        slots = {name: rng.choice(words) for name, words in FIELD_WORDS.items()}
        slots |= {"Early": capitalised(slots["early"]), "Number": capitalised(slots["number"])}
        observations = rng.sample(FIELD_SENTENCES[1:-1], rng.randint(3, 4))
        chosen = (FIELD_SENTENCES[0], *observations, FIELD_SENTENCES[-1])
        paragraphs.append(" ".join(rng.choice(wordings) for wordings in chosen).format(**slots))
    return paragraphs


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def jsonl(rows: Iterable[Row]) -> str:
    """Return the rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make_files() -> dict[str, str]:
    """Return all example files: file name -> text."""
    train, heldout = make_clinic_notes("clinic notes 1")
    return {
        "clinic_notes_train.jsonl": jsonl(train),
        "clinic_notes_heldout.jsonl": jsonl(heldout),
        "clinic_qa.json": json.dumps(make_clinic_qa("clinic qa 1"), ensure_ascii=False, indent=1) + "\n",
        "support_qa.jsonl": jsonl(make_support_qa("support qa 1")),
        "field_notes.txt": "\n\n".join(make_field_notes("field notes 1")) + "\n",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the example files."""
    parser = argparse.ArgumentParser(description="Write the example data of gptj-ft.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in make_files().items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{out / name}: {len(text.encode('utf-8'))} bytes")


if __name__ == "__main__":
    main()
